//! What to do about a connection that failed, by its cause.

/// What a message contains, and the remedy. The texts are those of rustls, h2, hyper and errno.
const REMEDIES: [(&str, &str); 13] = [
    // HTTP/2 or HTTP/1.1 that gets a TLS alert for an answer.
    (
        "frame with invalid size",
        "if it wants TLS, use https://; if it is no gRPC port, name another",
    ),
    (
        "invalid HTTP version parsed",
        "if it wants TLS, use https://; if it is no HTTP port, name another",
    ),
    // TLS that gets plain text.
    ("InvalidContentType", "it speaks plain text: use http://"),
    (
        "UnknownIssuer",
        "--ca names the authority that signed its certificate",
    ),
    // An authority of the same name with another key, or with one of another kind.
    (
        "BadSignature",
        "--ca names the authority that signed its certificate",
    ),
    (
        "UnsupportedSignatureAlgorithmForPublicKey",
        "--ca names the authority that signed its certificate",
    ),
    (
        "certificate not valid for name",
        "use a name of its certificate in the address",
    ),
    (
        "CaUsedAsEndEntity",
        "its certificate is an authority's: issue one with basicConstraints=critical,CA:FALSE for the daemon's tls.certificate",
    ),
    // Expired, ...
    (
        "invalid peer certificate",
        "replace its certificate: the daemon's tls.certificate",
    ),
    ("CertificateRequired", "it wants a certificate: --cert and --key"),
    (
        "alert: UnknownCA",
        "its tls.client_ca did not sign the certificate of --cert",
    ),
    ("does not speak HTTP/2 there", "name its gRPC or admin address"),
    (
        "Too many open files",
        "raise the limit of this process: ulimit -n",
    ),
];

/// The remedy, if the message names the cause.
pub fn known_remedy(message: &str) -> Option<&'static str> {
    let found = REMEDIES.iter().find(|(part, _)| message.contains(part));
    found.map(|(_, remedy)| *remedy)
}

/// The remedy for a connection to `url`, given by `--{flag}`, that failed with this message.
pub fn remedy(message: &str, flag: &str, url: &str) -> String {
    if let Some(remedy) = known_remedy(message) {
        return remedy.to_owned();
    }
    // TLS 1.3 is complete for the client before the server has checked its certificate, and a request sent
    // then may fail before the alert is read.
    if is_https(url)
        && ["broken pipe", "connection reset"]
            .iter()
            .any(|part| message.contains(part))
    {
        return "if it wants a certificate, use --cert and --key".to_owned();
    }
    format!("is ringfetchd there? --{flag} names another")
}

/// Whether a URL wants TLS. A scheme is case-insensitive (RFC 3986, section 3.1).
pub fn is_https(url: &str) -> bool {
    let scheme = url.split_once(':').map(|(scheme, _)| scheme);
    scheme.is_some_and(|scheme| scheme.eq_ignore_ascii_case("https"))
}
