// Linked into the static programs (release/build): host names come from /etc/hosts and DNS, whatever nsswitch.conf says.
// Both are part of glibc. Other services are libraries of the host's glibc, and loading those into a program that is
// statically linked with another version crashes it (release/test tries that).
#include <nss.h>

__attribute__((constructor)) static void only_built_in_services(void) {
    __nss_configure_lookup("hosts", "files dns");
}
