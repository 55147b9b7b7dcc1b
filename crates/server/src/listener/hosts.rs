//! The host names that a port accepts. A page in a browser on this host, or in its network, can send requests
//! here under any name that its author resolves to this address (DNS rebinding); such a request has that name
//! in `Host`.
//!
//! Loopback names are always accepted. Without configuration, a port on loopback accepts no others; any other port accepts
//! every IP address, which is safe from rebinding, and the service name of the compose file.

use std::net::{IpAddr, SocketAddr};

use http::header::HOST;
use http::uri::Authority;
use http::{Request, Version};

/// The service's name in docker-compose.yml, which Prometheus uses.
const SERVICE_NAME: &str = "ringfetchd";

/// The accepted host names of a port.
#[derive(Debug, Clone)]
pub struct AllowedHosts {
    names: Vec<String>,
    any: bool,
    addresses: bool,
}

/// An invalid host of a request.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum HostError {
    #[error("Host: missing, or more than one; send one")]
    Missing,
    /// RFC 9112 3.2 has 400 for it.
    #[error("Host: not of the form HOST or HOST:PORT")]
    Malformed,
    #[error("Host: not a name of this daemon; list the names that clients use in http.hosts")]
    Foreign,
}

impl AllowedHosts {
    /// The names for a port at `address`: those in `http.hosts`, or derived from the address.
    pub fn of(address: SocketAddr, configured: Option<&[String]>) -> Self {
        let is_local = address.ip().to_canonical().is_loopback();
        let names = match configured {
            // Without the dot of the root, as the names in requests are compared.
            Some(names) => names
                .iter()
                .map(|name| name.strip_suffix('.').unwrap_or(name).to_ascii_lowercase())
                .collect(),
            None if is_local => Vec::new(),
            None => vec![SERVICE_NAME.to_owned()],
        };
        Self {
            any: names.iter().any(|name| name == "*"),
            addresses: configured.is_some() || !is_local,
            names,
        }
    }

    /// Checks the request target's authority and the `Host` header.
    ///
    /// # Errors
    /// A host that is not accepted, or none.
    pub(super) fn check<B>(&self, request: &Request<B>) -> Result<(), HostError> {
        let authority = request.uri().authority().map(|authority| authority.as_str());
        let mut named = request.headers().get_all(HOST).iter();
        let (header, another) = (named.next(), named.next());
        let is_missing = match request.version() {
            // Some health checks omit it.
            Version::HTTP_10 => false,
            Version::HTTP_11 => header.is_none(),
            _ => header.is_none() && authority.is_none(),
        };
        if is_missing || another.is_some() {
            return Err(HostError::Missing);
        }
        let header = header.map(|header| header.to_str()).transpose();
        let header = header.map_err(|_| HostError::Malformed)?;
        let is_ours = |name: Option<&str>| name.is_none_or(|name| self.knows(name));
        if is_ours(authority) && is_ours(header) {
            Ok(())
        } else if !header.is_none_or(is_host) {
            Err(HostError::Malformed)
        } else if self.any {
            Ok(())
        } else {
            Err(HostError::Foreign)
        }
    }

    /// Whether a host, with or without a port, is accepted.
    fn knows(&self, host: &str) -> bool {
        let name = match host.strip_prefix('[') {
            // An IPv6 address (RFC 3986 3.2.2).
            Some(rest) => match rest.split_once(']') {
                Some((address, port)) if port.is_empty() || is_port(port) => {
                    return address
                        .parse()
                        .is_ok_and(|address| self.knows_address(IpAddr::V6(address)));
                }
                Some(_) | None => return false,
            },
            None => match host.find(':') {
                Some(colon) if is_port(&host[colon..]) => &host[..colon],
                Some(_) => return false,
                None => host,
            },
        };
        if let Ok(address) = name.parse() {
            return self.knows_address(IpAddr::V4(address));
        }
        let name = name.strip_suffix('.').unwrap_or(name);
        let is_below = |domain: &str| {
            let (length, least) = (name.len(), domain.len() + 1);
            length > least
                && name.as_bytes().get(length - least) == Some(&b'.')
                && name
                    .get(length - domain.len()..)
                    .is_some_and(|end| end.eq_ignore_ascii_case(domain))
        };
        name.eq_ignore_ascii_case("localhost")
            || is_below("localhost")
            || self.names.iter().any(|known| match known.strip_prefix("*.") {
                Some(domain) => is_below(domain),
                None => name.eq_ignore_ascii_case(known),
            })
    }

    fn knows_address(&self, address: IpAddr) -> bool {
        self.addresses || address.to_canonical().is_loopback()
    }
}

/// Whether this is a host, with or without a port, wherever it is. An empty one is (RFC 9110 7.2).
fn is_host(text: &str) -> bool {
    let host = text.parse::<Authority>();
    let port = host.as_ref().ok().and_then(|host| text.strip_prefix(host.host()));
    text.is_empty() || port.is_some_and(|port| port.is_empty() || is_port(port))
}

/// `:` and a number.
fn is_port(text: &str) -> bool {
    text.strip_prefix(':')
        .is_some_and(|port| port.len() <= 5 && port.bytes().all(|byte| byte.is_ascii_digit()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hosts(address: &str, configured: Option<&[&str]>) -> AllowedHosts {
        let configured: Option<Vec<String>> =
            configured.map(|names| names.iter().map(|name| (*name).to_owned()).collect());
        AllowedHosts::of(address.parse().unwrap(), configured.as_deref())
    }

    const LOCAL: [&str; 9] = [
        "localhost",
        "LOCALHOST:7411",
        "localhost.",
        "a.localhost:1",
        "127.0.0.1",
        "127.9.9.9:7411",
        "[::1]",
        "[::1]:7411",
        "[::ffff:127.0.0.1]:7411",
    ];
    const ADDRESSES: [&str; 4] = ["192.0.2.1", "192.0.2.1:80", "[2001:db8::1]:7411", "0.0.0.0:7411"];
    const NEVER: [&str; 16] = [
        "evil.example",
        "evil.example:7411",
        "localhost.evil.example",
        "127.0.0.1.evil.example",
        "notlocalhost",
        ".localhost.x",
        "",
        ":7411",
        "localhost:x",
        "localhost:7411:7411",
        "localhost@evil.example",
        "evil.example#localhost",
        "[::1]evil.example",
        "[::1",
        "127.1",
        "0x7f.0.0.1",
    ];

    #[test]
    fn loopback_names_are_good_and_foreign_names_are_not() {
        // Scenario: a loopback address, all interfaces, and a list. Expectation: loopback names are accepted
        // everywhere; IP addresses and the compose service's name except on loopback; the names in the list;
        // nothing that only looks like these. A dot at the end means
        // the same name.
        let (loopback, all) = (hosts("127.0.0.1:7411", None), hosts("0.0.0.0:7411", None));
        let listed = hosts("[::1]:7411", Some(&["Data.example", "*.pods.example"]));
        let rooted = hosts("[::1]:7411", Some(&["Data.example.", "*.pods.example."]));
        for host in LOCAL {
            for hosts in [&loopback, &all, &listed] {
                assert!(hosts.knows(host), "{host}: {hosts:?}");
            }
        }
        for host in ADDRESSES {
            assert!(
                !loopback.knows(host) && all.knows(host) && listed.knows(host),
                "{host}"
            );
        }
        for host in NEVER {
            for hosts in [&loopback, &all, &listed] {
                assert!(!hosts.knows(host), "{host:?}: {hosts:?}");
            }
        }
        assert!(
            !loopback.knows("ringfetchd:7411") && all.knows("ringfetchd:7411") && !listed.knows("ringfetchd")
        );
        for host in [
            "data.example",
            "DATA.EXAMPLE:7411",
            "a.pods.example",
            "b.a.pods.example:1",
        ] {
            assert!(listed.knows(host) && !all.knows(host), "{host}");
            assert!(rooted.knows(host), "{host}");
        }
        assert!(listed.knows("data.example.") && rooted.knows("data.example.:7411"));
        for host in ["pods.example", ".pods.example", "xdata.example", "apods.example"] {
            assert!(!listed.knows(host), "{host}");
        }
    }

    #[test]
    fn every_name_in_a_request_counts() {
        // Scenario: requests with a target and headers. Expectation: a foreign name in either is refused, as
        // are two headers, and a missing one except with HTTP/1.0; HTTP/1.1 needs it even if the target has a name
        // (RFC 9112 3.2). `*` accepts every name, but not two. What is no name at all is malformed.
        let check = |hosts: &AllowedHosts, target: &str, names: &[&str], version| {
            let mut request = Request::get(target).version(version);
            for name in names {
                request = request.header(HOST, *name);
            }
            hosts.check(&request.body(()).unwrap())
        };
        let ours = hosts("127.0.0.1:7411", None);
        let h1 = Version::HTTP_11;
        assert_eq!(check(&ours, "/", &["localhost"], h1), Ok(()));
        assert_eq!(check(&ours, "/", &["evil.example"], h1), Err(HostError::Foreign));
        assert_eq!(
            check(&ours, "http://evil.example/", &["localhost"], h1),
            Err(HostError::Foreign)
        );
        assert_eq!(
            check(&ours, "http://localhost/", &["evil.example"], h1),
            Err(HostError::Foreign)
        );
        assert_eq!(check(&ours, "http://127.0.0.1:1/", &[], Version::HTTP_2), Ok(()));
        assert_eq!(
            check(&ours, "/", &["localhost", "localhost"], h1),
            Err(HostError::Missing)
        );
        assert_eq!(check(&ours, "/", &[], h1), Err(HostError::Missing));
        assert_eq!(check(&ours, "/", &[], Version::HTTP_10), Ok(()));
        assert_eq!(
            check(&ours, "http://localhost/", &[], h1),
            Err(HostError::Missing)
        );
        assert_eq!(check(&ours, "http://localhost/", &["localhost"], h1), Ok(()));
        let all = hosts("127.0.0.1:1", Some(&["*"]));
        for host in [
            "evil.example",
            "evil.example:80",
            "evil.example:",
            "[2001:db8::1]:80",
            "a_b",
            "",
        ] {
            assert_eq!(check(&all, "/", &[host], h1), Ok(()), "{host:?}");
            assert_eq!(
                check(&ours, "/", &[host], h1),
                Err(HostError::Foreign),
                "{host:?}"
            );
        }
        for host in [
            "localhost:x",
            "localhost:80:80",
            "localhost@evil.example",
            "evil.example#localhost",
            "localhost/",
            "local host",
            "[::1]evil.example",
            "[::1",
            "\u{e9}.example",
        ] {
            for hosts in [&all, &ours] {
                assert_eq!(
                    check(hosts, "/", &[host], h1),
                    Err(HostError::Malformed),
                    "{host:?}"
                );
            }
        }
        let two = ["evil.example", "localhost"];
        assert_eq!(check(&all, "/", &two, h1), Err(HostError::Missing));
        assert_eq!(check(&all, "/", &[], h1), Err(HostError::Missing));
    }
}
