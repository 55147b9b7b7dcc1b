"""Credentials of a soak's clients: tokens and certificates, the principals file that names them, and the authority."""

import collections
import hashlib
import os
import pathlib
import re
import ssl

from processes import run

# Names of the principals whose credentials change.
OWNERS = {"token": "clients", "certificate": "holders"}


class Credential(collections.namedtuple("Credential", "kind value")):
    """`kind`: token or certificate; `value`: the token, or the certificate's name in the principals file."""

    def token(self):
        return self.value if self.kind == "token" else None

    def headers(self):
        return {"Authorization": f"Bearer {self.value}"} if self.kind == "token" else {}

    def in_file(self):
        if self.kind == "token":
            return f"sha256:{hashlib.sha256(self.value.encode()).hexdigest()}"
        return f"certificate:{self.value}"


class Certificates:
    """An authority, and its certificates for the daemon and for clients; new ones on demand."""

    def __init__(self, directory):
        self.directory = pathlib.Path(directory)
        self.directory.mkdir()
        self.contexts = {}
        self._openssl("ca", "/CN=soak authority", "-addext", "keyUsage=critical,keyCertSign")
        self._openssl("other-ca", "/CN=another authority", "-addext", "keyUsage=critical,keyCertSign")
        self.make("server")
        self.make("client")
        (self.directory / "authorities.pem").write_text(self.path("ca.pem").read_text())

    def path(self, name):
        return self.directory / name

    def _openssl(self, name, subject, *arguments):
        run(["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "30", "-subj", subject,
             "-keyout", self.path(f"{name}.key"), "-out", self.path(f"{name}.pem"), *arguments])

    def make(self, name, authority="ca", subject=None, alternatives="IP:127.0.0.1"):
        """Makes a certificate NAME.pem and its key; each replaces the old one by rename, one after the other."""
        self._openssl("new", subject or f"/CN={name}", "-CA", self.path(f"{authority}.pem"), "-CAkey", self.path(f"{authority}.key"),
                      "-addext", "basicConstraints=critical,CA:FALSE", "-addext", f"subjectAltName={alternatives}",
                      "-addext", "extendedKeyUsage=serverAuth,clientAuth")
        os.rename(self.path("new.key"), self.path(f"{name}.key"))
        os.rename(self.path("new.pem"), self.path(f"{name}.pem"))

    def make_client(self, name, authority="ca", file=None):
        """Makes a certificate that the principals file calls `name`: a URI, a DNS name, or CN= and a common name, along with
        other names."""
        others = "DNS:other.soak,URI:spiffe://soak/other"
        if name.startswith("CN="):
            subject, alternatives = f"/{name}", others
        else:
            subject, alternatives = "/CN=somebody", f"{others},{'URI' if '://' in name else 'DNS'}:{name}"
        self.make(file or file_of(name), authority, subject, alternatives)

    def forged(self, name):
        """A certificate with this name from an authority that the daemon does not know, in the form that `context` takes."""
        file = f"forged-{file_of(name)}"
        self.make_client(name, "other-ca", file)
        return file

    def context(self, *protocols, client="client"):
        """The TLS context of clients; `client`: whose certificate they present."""
        key = (client, protocols)
        if key not in self.contexts:
            context = ssl.create_default_context(cafile=self.path("ca.pem"))
            context.load_cert_chain(self.path(f"{file_of(client)}.pem"), self.path(f"{file_of(client)}.key"))
            if protocols:
                context.set_alpn_protocols(list(protocols))
            self.contexts[key] = context
        return self.contexts[key]

    def server_certificate(self):
        return ssl.PEM_cert_to_DER_cert(self.path("server.pem").read_text())


def file_of(name):
    return re.sub(r"[^A-Za-z0-9-]", "_", name)


class Principals:
    """The principals file: clients with a token and clients with a certificate, both of which change, misbehaving clients,
    and administrators."""

    def __init__(self, path, certificates=None):
        self.path, self.certificates, self.made = pathlib.Path(path), certificates, 0
        self.attacker, self.operator = "attacker-0", "operator-0"
        # The file may name certificates only while the daemon has TLS.
        self.with_certificates = False
        kinds = ["token", *(["certificate"] if certificates else [])]
        # `current`: what clients use; `accepted`: what the file contains.
        self.current = {kind: self.make(kind) for kind in kinds}
        self.accepted = {kind: [current] for kind, current in self.current.items()}
        self.write()

    def make(self, kind):
        """A new credential that is not accepted yet."""
        self.made += 1
        if kind == "token":
            return Credential(kind, f"client-{self.made}")
        forms = ["client-{}.soak", "spiffe://soak/client-{}", "CN=client-{}"]
        name = forms[self.made % len(forms)].format(self.made)
        self.certificates.make_client(name)
        return Credential(kind, name)

    def credential(self, kind):
        return self.current[kind]

    def is_current(self, credential):
        return self.current[credential.kind] == credential

    def use(self, credential):
        """Makes clients use it."""
        self.current[credential.kind] = credential

    def accept(self, *credentials):
        """Writes the file with these credentials in place of others of their kind."""
        self.accepted[credentials[0].kind] = list(credentials)
        self.write()

    def text(self):
        lines = [(OWNERS[kind], credential, "*") for kind, accepted in self.accepted.items() for credential in accepted
                 if kind == "token" or self.with_certificates]
        lines += [("attacker", Credential("token", self.attacker), "*"),
                  ("operator", Credential("token", self.operator), "*,@metrics,@admin")]
        return "".join(f"{name} {credential.in_file()} {rights}\n" for name, credential, rights in lines)

    def write(self, text=None):
        """Writes the file by rename; `text`: its contents, instead of the credentials'."""
        new = self.path.with_suffix(".new")
        new.write_text(self.text() if text is None else text)
        os.rename(new, self.path)

    def mistakes(self):
        """Files that must be refused."""
        good = self.text()
        # Without TLS certificates cannot be verified; with TLS the name is missing, or its principal has other rights.
        certificate = ["holders certificate: *\n", "clients certificate:other blocks\n"] if self.with_certificates else [
            "holders certificate:holder *\n"]
        return ["", "nobody\n", good + good, good + "clients sha256:12 *\n", good.replace("@admin", "@root"),
                good + f"clients sha256:{'0' * 64} blocks\n", good.replace("attacker ", "attacker/x "), *(good + line for line in certificate)]
