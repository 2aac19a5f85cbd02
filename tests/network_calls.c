/* Stands in front of the C library's calls that name or reach another machine: LD_PRELOAD.
 *
 * Each goes on a line of the file that the variable NETWORK_CALLS names: the call, and the host or the address. */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <dlfcn.h>
#include <fcntl.h>
#include <netdb.h>
#include <netinet/in.h>
#include <resolv.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

static void told(const char *call, const char *what) {
  char line[512];
  const char *path = getenv("NETWORK_CALLS");
  if (!path || !what) return;
  int file = syscall(SYS_openat, AT_FDCWD, path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
  int length = snprintf(line, sizeof line, "%s\t%.400s\n", call, what);
  if (file < 0 || syscall(SYS_write, file, line, length) != length) abort();
  syscall(SYS_close, file);
}

/* Addresses of other families stay on this machine. */
static void told_address(const char *call, const struct sockaddr *address) {
  char text[INET6_ADDRSTRLEN];
  if (!address) return;
  const void *bytes = address->sa_family == AF_INET    ? (const void *)&((const struct sockaddr_in *)address)->sin_addr
                      : address->sa_family == AF_INET6 ? (const void *)&((const struct sockaddr_in6 *)address)->sin6_addr
                                                       : NULL;
  if (bytes) told(call, inet_ntop(address->sa_family, bytes, text, sizeof text));
}

#define NEXT(name) \
  static __typeof__(name) *next; \
  if (!next) next = (__typeof__(name) *)dlsym(RTLD_NEXT, #name)

#define NAMES(result, name, parameters, host, arguments) \
  result name parameters { \
    NEXT(name); \
    told(#name, host); \
    return next arguments; \
  }

NAMES(int, getaddrinfo,
      (const char *host, const char *service, const struct addrinfo *hints, struct addrinfo **found), host,
      (host, service, hints, found))
NAMES(struct hostent *, gethostbyname, (const char *host), host, (host))
NAMES(struct hostent *, gethostbyname2, (const char *host, int family), host, (host, family))
NAMES(int, gethostbyname_r,
      (const char *host, struct hostent *entry, char *buffer, size_t bytes, struct hostent **found, int *error),
      host, (host, entry, buffer, bytes, found, error))
NAMES(int, gethostbyname2_r,
      (const char *host, int family, struct hostent *entry, char *buffer, size_t bytes, struct hostent **found,
       int *error),
      host, (host, family, entry, buffer, bytes, found, error))
#undef res_query
#undef res_search
NAMES(int, res_query, (const char *host, int class, int type, unsigned char *answer, int bytes), host,
      (host, class, type, answer, bytes))
NAMES(int, res_search, (const char *host, int class, int type, unsigned char *answer, int bytes), host,
      (host, class, type, answer, bytes))

#define REACHES(result, name, parameters, address, arguments) \
  result name parameters { \
    NEXT(name); \
    told_address(#name, address); \
    return next arguments; \
  }

REACHES(int, connect, (int fd, const struct sockaddr *to, socklen_t bytes), to, (fd, to, bytes))
REACHES(int, bind, (int fd, const struct sockaddr *at, socklen_t bytes), at, (fd, at, bytes))
REACHES(ssize_t, sendto,
        (int fd, const void *data, size_t bytes, int flags, const struct sockaddr *to, socklen_t length), to,
        (fd, data, bytes, flags, to, length))
REACHES(ssize_t, sendmsg, (int fd, const struct msghdr *message, int flags), message->msg_name, (fd, message, flags))

int sendmmsg(int fd, struct mmsghdr *messages, unsigned count, int flags) {
  NEXT(sendmmsg);
  for (unsigned i = 0; i < count; i++) told_address("sendmmsg", messages[i].msg_hdr.msg_name);
  return next(fd, messages, count, flags);
}
