//! The sections of the PEM files of `tls`. The parser skips what it does not recognize, so that a daemon would run with one
//! authority less, or as if it knew a revocation list. Here a file is refused whose sections are not all of a kind that it may
//! have.

use crate::key_file::{FileError, KeyFile};

/// The label of a certificate.
const CERTIFICATE: &str = "CERTIFICATE";
/// How the label of a private key ends.
pub(super) const PRIVATE_KEY: &str = "PRIVATE KEY";

/// Longest label that is repeated in a message.
const LABEL_BYTES_MAX: usize = 32;

/// What a file is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Use {
    /// Authorities of clients: certificates only.
    Authorities,
    /// The daemon's certificate and key: also what else is in the files that servers share.
    Server,
}

impl Use {
    fn allows(self, label: &str) -> bool {
        let is_of_server =
            || label.ends_with(PRIVATE_KEY) || matches!(label, "EC PARAMETERS" | "DH PARAMETERS");
        label == CERTIFICATE || (self == Self::Server && is_of_server())
    }
}

impl KeyFile<'_> {
    /// The labels of the sections, all of which the file may have. Each section has its first and last line, as the parser
    /// recognizes them. An error contains nothing of the file but a label.
    pub(super) fn sections(&self, of: Use) -> Result<Vec<String>, FileError> {
        let text = String::from_utf8_lossy(&self.bytes);
        let mut labels: Vec<String> = Vec::new();
        let mut end = None;
        for (number, line) in (1_usize..).zip(text.split('\n')) {
            // The parser ends lines at both.
            for mark in line.split('\r').filter(|line| is_mark(line)) {
                match (end.take(), label_of(mark)) {
                    (None, Some(label)) => {
                        self.check_label(of, label)?;
                        end = Some(format!("-----END {label}-----"));
                        labels.push(label.to_owned());
                    }
                    (Some(expected), None) if mark.trim_end() == expected => {}
                    (None | Some(_), _) => {
                        return Err(self.error(
                            format!("line {number} is not recognized as the first or last line of a PEM section"),
                            "begin each section on a line of its own, -----BEGIN CERTIFICATE-----, and end it likewise",
                        ));
                    }
                }
            }
        }
        Ok(labels)
    }

    fn check_label(&self, of: Use, label: &str) -> Result<(), FileError> {
        if of.allows(label) {
            return Ok(());
        }
        let problem = format!("holds a section {label:?}");
        Err(match of {
            Use::Authorities if label == "X509 CRL" => self.error(
                format!("{problem}, and revocation lists are not supported"),
                "leave it out; to refuse a client, remove its principal, or replace the authority",
            ),
            Use::Authorities => self.error(problem, "leave in it only sections CERTIFICATE"),
            Use::Server => self.error(
                problem,
                "leave in it only sections CERTIFICATE, of private keys, and of parameters",
            ),
        })
    }
}

/// Whether a line looks like the first or last line of a section, also a damaged one. Comments after # do not.
fn is_mark(line: &str) -> bool {
    let line = line.trim();
    let names = |word| {
        line.split_once(word).is_some_and(|(before, _)| {
            let is_word = !before.ends_with(char::is_alphanumeric);
            is_word && (ends_in_dashes(before.trim_end()) || ends_in_dashes(line))
        })
    };
    !line.starts_with('#') && (names("BEGIN ") || names("END "))
}

/// Two dashes or more, also of those that word processors put in their place.
fn ends_in_dashes(text: &str) -> bool {
    let is_dash = |c: &char| matches!(c, '-' | '\u{2010}'..='\u{2015}' | '\u{2212}');
    text.chars().rev().take_while(is_dash).take(2).count() == 2
}

/// The label of a section's first line. What has other characters may be a key whose lines were joined.
fn label_of(line: &str) -> Option<&str> {
    let line = line.trim_end_matches(' ').strip_prefix("-----BEGIN ")?;
    let label = line.strip_suffix("-----")?;
    let is_of_label = |c: char| c.is_ascii_uppercase() || c.is_ascii_digit() || c == ' ';
    (label.len() <= LABEL_BYTES_MAX && label.chars().all(is_of_label)).then_some(label)
}

#[cfg(test)]
mod tests {
    use super::*;
    use rcgen::{CertificateParams, KeyPair};
    use tokio_rustls::rustls::pki_types::CertificateDer;
    use tokio_rustls::rustls::pki_types::pem::PemObject as _;

    const SERVER: &str = "leave in it only sections CERTIFICATE, of private keys, and of parameters";

    /// What is wrong with a file for this use; checks that a good one loses nothing in the parser.
    fn problem(text: &str, of: Use) -> Option<String> {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("file.pem");
        std::fs::write(&path, text).unwrap();
        let file = KeyFile::read("tls.client_ca", &path).unwrap();
        match file.sections(of) {
            Ok(labels) => {
                let certificates = labels.iter().filter(|label| *label == CERTIFICATE).count();
                let parsed = CertificateDer::pem_slice_iter(text.as_bytes());
                assert_eq!(certificates, parsed.map(Result::unwrap).count(), "{text}");
                None
            }
            Err(error) => {
                let said = error.to_string();
                assert!(
                    said.starts_with("tls.client_ca: ") && said.contains("file.pem: "),
                    "{said}"
                );
                assert!(!said.contains("SECRET") && !said.contains("c2VjcmV0"), "{said}");
                Some(said)
            }
        }
    }

    fn section(label: &str) -> String {
        format!("-----BEGIN {label}-----\nc2VjcmV0\n-----END {label}-----\n")
    }

    #[test]
    fn every_section_is_one_that_the_file_may_have() {
        // Scenario: files with a certificate and a section of another kind, first or last, for authorities and for the daemon.
        // Expectation: authorities are certificates only; the daemon's files may have what servers' files have; else the
        // label is named; of a revocation list it is said that they are not supported, and what to do instead.
        let certificate = section(CERTIFICATE);
        for (label, is_of_server) in [
            ("CERTIFICATE", true),
            ("PRIVATE KEY", true),
            ("RSA PRIVATE KEY", true),
            ("EC PRIVATE KEY", true),
            ("ENCRYPTED PRIVATE KEY", true),
            ("EC PARAMETERS", true),
            ("DH PARAMETERS", true),
            ("X509 CRL", false),
            ("PKCS7", false),
            ("CMS", false),
            ("CERTIFICATE REQUEST", false),
            ("NEW CERTIFICATE REQUEST", false),
            ("TRUSTED CERTIFICATE", false),
            ("X509 CERTIFICATE", false),
            ("ATTRIBUTE CERTIFICATE", false),
            ("PUBLIC KEY", false),
            ("CERTIFICATE ", false),
            (" CERTIFICATE", false),
            ("", false),
        ] {
            let other = section(label);
            for text in [
                [&certificate[..], &other].concat(),
                [&other[..], &certificate].concat(),
            ] {
                let named = format!("holds a section {label:?}");
                let refused = problem(&text, Use::Authorities);
                assert_eq!(refused.is_none(), label == CERTIFICATE, "{label}");
                if let Some(said) = refused {
                    assert!(said.contains(&named), "{said}");
                    let is_list = said.contains("revocation lists are not supported")
                        && said.contains("remove its principal, or replace the authority");
                    assert_eq!(is_list, label == "X509 CRL", "{said}");
                }
                match problem(&text, Use::Server) {
                    None => assert!(is_of_server, "{label}"),
                    Some(said) => {
                        assert!(
                            !is_of_server && said.ends_with(&format!("{named}; {SERVER}")),
                            "{said}"
                        );
                    }
                }
            }
        }
    }

    #[test]
    fn a_damaged_line_hides_no_section() {
        // Scenario: a good certificate, and one whose first or last line is damaged: joined, indented, with other dashes or
        // blanks, without its counterpart, after a byte order mark, or all in one line. Expectation: refused, with the number
        // of the line and without a character of the section.
        let good = section(CERTIFICATE);
        for (damaged, line) in [
            ("-----END CERTIFICATE----------BEGIN CERTIFICATE-----\n", 4),
            (" -----BEGIN X509 CRL-----\nc2VjcmV0\n-----END X509 CRL-----\n", 4),
            (
                "\u{feff}-----BEGIN X509 CRL-----\nc2VjcmV0\n-----END X509 CRL-----\n",
                4,
            ),
            ("----BEGIN X509 CRL----\nc2VjcmV0\n----END X509 CRL----\n", 4),
            (
                "------BEGIN X509 CRL------\nc2VjcmV0\n------END X509 CRL------\n",
                4,
            ),
            (
                "----- BEGIN X509 CRL -----\nc2VjcmV0\n----- END X509 CRL -----\n",
                4,
            ),
            ("–––––BEGIN X509 CRL–––––\nc2VjcmV0\n–––––END X509 CRL–––––\n", 4),
            ("——-BEGIN X509 CRL——-\nc2VjcmV0\n——-END X509 CRL——-\n", 4),
            ("BEGIN X509 CRL-----\nc2VjcmV0\n-----END X509 CRL-----\n", 4),
            ("-----BEGIN X509 CRL\nc2VjcmV0\n-----END X509 CRL-----\n", 4),
            ("-----BEGIN x509 crl-----\nc2VjcmV0\n-----END x509 crl-----\n", 4),
            (
                "-----BEGIN CERTIFICATE----- c2VjcmV0 -----END CERTIFICATE-----\n",
                4,
            ),
            ("c2VjcmV0\n-----END X509 CRL-----\n", 5),
            ("-----BEGINX509 CRL-----\nc2VjcmV0\n-----END X509 CRL-----\n", 6),
            (
                "-----BEGIN CERTIFICATE-----\nc2VjcmV0\n-----END X509 CRL-----\n",
                6,
            ),
            (
                "-----BEGIN CERTIFICATE-----\nc2VjcmV0\n-----BEGIN CERTIFICATE-----\n",
                6,
            ),
            (
                "-----BEGIN SECRETSECRETSECRETSECRETSECRETSECRET-----\nc2VjcmV0\n",
                4,
            ),
        ] {
            for of in [Use::Authorities, Use::Server] {
                let said = problem(&[&good[..], damaged].concat(), of).expect(damaged);
                assert!(
                    said.contains(&format!(": line {line} is not recognized")),
                    "{said}"
                );
            }
        }
    }

    #[test]
    fn text_between_sections_is_none_of_them() {
        // Scenario: certificates with what tools and people write around them, and line ends of each kind. Expectation: good.
        let key = KeyPair::generate().unwrap();
        let certificate = CertificateParams::default().self_signed(&key).unwrap().pem();
        for text in [
            "Certificate:\n    Data:\n        Version: 3 (0x2)\n",
            "# BEGIN ANSIBLE MANAGED BLOCK\n# END ANSIBLE MANAGED BLOCK\n",
            "# ----- BEGIN authorities of clients -----\n#-----BEGIN X509 CRL-----\n",
            "subject=CN = FRONT-END CA, OU = BACKEND\n",
            "Example Root\n============\n",
            "-----\n",
        ] {
            for line_end in ["\n", "\r\n", "\r"] {
                let whole = [text, &certificate, text, &certificate]
                    .concat()
                    .replace('\n', line_end);
                assert_eq!(problem(&whole, Use::Authorities), None, "{text}");
            }
        }
        let blanks = certificate.replace("E-----\n", "E-----  \n");
        assert_eq!(problem(&blanks, Use::Authorities), None);
    }
}
