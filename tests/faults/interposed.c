/* Stands in front of the C library's calls that change files: LD_PRELOAD.
 *
 * Counts those of a process that concern one folder, writes their names and sizes to a log, and at the n-th one
 * ends the process, interrupts it, or lets the call fail. A disk may hold so many bytes and no more. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/sendfile.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

static char folder[PATH_MAX];
static long log_fd = -1, counted, fault_at = -1, fault_signal, fault_error, no_exchange;
static long long space = -1;

/* From here on calls below `path` count; `at` is the one that `signal` comes at, or that fails with
 * `error`, and `bytes` the capacity of the disk; -1 for neither. `exchange` 0: names cannot be
 * exchanged at once. */
void interpose(const char *path, long log, long at, long signal, long error, long long bytes,
               long exchange) {
  strncpy(folder, path, sizeof folder - 1);
  log_fd = log, counted = 0, fault_at = at, fault_signal = signal, fault_error = error;
  space = bytes, no_exchange = !exchange;
}

static int inside(const char *path) {
  size_t length = strlen(folder);
  return length && !strncmp(path, folder, length);
}

static const char *absolute(int directory, const char *path, char *buffer) {
  char link[64];
  if (path[0] == '/') return path;
  snprintf(link, sizeof link, directory == AT_FDCWD ? "/proc/self/cwd" : "/proc/self/fd/%d", directory);
  ssize_t n = readlink(link, buffer, PATH_MAX - strlen(path) - 2);
  if (n < 0) return path;
  buffer[n] = '/';
  strcpy(buffer + n + 1, path);
  return buffer;
}

/* 0, or the error that the call fails with; does not come back where the process ends. `torn`: what a
 * killed process has done of the call. */
static int event(const char *call, const char *path, int descriptor, const void *torn, size_t bytes) {
  char line[PATH_MAX + 64];
  long n = __atomic_add_fetch(&counted, 1, __ATOMIC_SEQ_CST);
  if (log_fd >= 0) {
    int length = snprintf(line, sizeof line, "%s\t%s\t%zu\n", call, path, bytes);
    syscall(SYS_write, (int)log_fd, line, length);
  }
  if (n != fault_at) return 0;
  if (fault_signal == SIGKILL && torn) syscall(SYS_write, descriptor, torn, bytes / 2);
  if (fault_signal > 0) kill(getpid(), fault_signal);
  return fault_error > 0 ? fault_error : 0;
}

static int at(const char *call, int directory, const char *path) {
  char buffer[PATH_MAX];
  int before = errno;
  const char *whole = absolute(directory, path, buffer);
  int error = inside(whole) ? event(call, whole, -1, NULL, 0) : 0;
  errno = error ? error : before;
  return error;
}

static int on(const char *call, int descriptor, const void *data, size_t bytes) {
  char link[64], path[PATH_MAX];
  int before = errno;
  snprintf(link, sizeof link, "/proc/self/fd/%d", descriptor);
  ssize_t n = folder[0] ? readlink(link, path, sizeof path - 1) : -1;
  errno = before;
  if (n < 0) return 0;
  path[n] = 0;
  if (!inside(path)) return 0;
  int error = event(call, path, descriptor, data, bytes);
  errno = error ? error : before;
  return error ? -error : 1;
}

/* How much of so many bytes the disk takes; -1 where it is full. */
static ssize_t taken(size_t bytes) {
  if (space < 0) return bytes;
  if (!space && bytes) {
    errno = ENOSPC;
    return -1;
  }
  if ((long long)bytes > space) bytes = space;
  space -= bytes;
  return bytes;
}

#define NEXT(name) \
  static __typeof__(name) *next; \
  if (!next) next = (__typeof__(name) *)dlsym(RTLD_NEXT, #name)

#define PATH_CALL(name, parameters, directory, path, arguments) \
  int name parameters { \
    NEXT(name); \
    return at(#name, directory, path) ? -1 : next arguments; \
  }

PATH_CALL(mkdir, (const char *path, mode_t mode), AT_FDCWD, path, (path, mode))
PATH_CALL(mkdirat, (int folder, const char *path, mode_t mode), folder, path, (folder, path, mode))
PATH_CALL(rmdir, (const char *path), AT_FDCWD, path, (path))
PATH_CALL(unlink, (const char *path), AT_FDCWD, path, (path))
PATH_CALL(unlinkat, (int folder, const char *path, int flags), folder, path, (folder, path, flags))
PATH_CALL(rename, (const char *from, const char *to), AT_FDCWD, to, (from, to))
PATH_CALL(link, (const char *from, const char *to), AT_FDCWD, to, (from, to))
PATH_CALL(symlink, (const char *from, const char *to), AT_FDCWD, to, (from, to))
PATH_CALL(chmod, (const char *path, mode_t mode), AT_FDCWD, path, (path, mode))
PATH_CALL(renameat, (int one, const char *from, int other, const char *to), other, to,
          (one, from, other, to))
PATH_CALL(linkat, (int one, const char *from, int other, const char *to, int flags), other, to,
          (one, from, other, to, flags))

int renameat2(int one, const char *from, int other, const char *to, unsigned flags) {
  NEXT(renameat2);
  if (no_exchange && inside(to)) {
    errno = EINVAL;
    return -1;
  }
  return at("renameat2", other, to) ? -1 : next(one, from, other, to, flags);
}

#define WRITES(flags) ((flags) & (O_WRONLY | O_RDWR | O_CREAT | O_TRUNC))

#define OPEN(name) \
  int name(const char *path, int flags, ...) { \
    va_list rest; \
    va_start(rest, flags); \
    int mode = va_arg(rest, int); \
    va_end(rest); \
    NEXT(name); \
    return WRITES(flags) && at("open", AT_FDCWD, path) ? -1 : next(path, flags, mode); \
  }
OPEN(open)
OPEN(open64)

#define OPENAT(name) \
  int name(int folder, const char *path, int flags, ...) { \
    va_list rest; \
    va_start(rest, flags); \
    int mode = va_arg(rest, int); \
    va_end(rest); \
    NEXT(name); \
    return WRITES(flags) && at("open", folder, path) ? -1 : next(folder, path, flags, mode); \
  }
OPENAT(openat)
OPENAT(openat64)

#define FOPEN(name) \
  FILE *name(const char *path, const char *mode) { \
    NEXT(name); \
    return mode[0] != 'r' && at("open", AT_FDCWD, path) ? NULL : next(path, mode); \
  }
FOPEN(fopen)
FOPEN(fopen64)

#define SYNC(name) \
  int name(int descriptor) { \
    NEXT(name); \
    return on(#name, descriptor, NULL, 0) < 0 ? -1 : next(descriptor); \
  }
SYNC(fsync)
SYNC(fdatasync)

/* A call that writes `bytes` of `data`, where these are known. */
#define WRITE(result, name, parameters, descriptor, data, bytes, arguments) \
  result name parameters { \
    NEXT(name); \
    int here = on(#name, descriptor, data, bytes); \
    if (here < 0) return -1; \
    if (here) { \
      ssize_t most = taken(bytes); \
      if (most < 0) return -1; \
      bytes = most; \
    } \
    result done = next arguments; \
    if (here && space >= 0) space += (long long)bytes - (done < 0 ? 0 : done); \
    return done; \
  }
WRITE(ssize_t, write, (int fd, const void *data, size_t bytes), fd, data, bytes, (fd, data, bytes))
WRITE(ssize_t, pwrite, (int fd, const void *data, size_t bytes, off_t offset), fd, NULL, bytes,
      (fd, data, bytes, offset))
WRITE(ssize_t, pwrite64, (int fd, const void *data, size_t bytes, off64_t offset), fd, NULL, bytes,
      (fd, data, bytes, offset))
WRITE(ssize_t, sendfile, (int fd, int from, off_t *offset, size_t bytes), fd, NULL, bytes,
      (fd, from, offset, bytes))
WRITE(ssize_t, sendfile64, (int fd, int from, off64_t *offset, size_t bytes), fd, NULL, bytes,
      (fd, from, offset, bytes))

ssize_t writev(int fd, const struct iovec *parts, int count) {
  NEXT(writev);
  int here = on("writev", fd, NULL, 0);
  if (here < 0) return -1;
  if (!here || space < 0) return next(fd, parts, count);
  while (count > 1 && !parts->iov_len) parts++, count--;
  ssize_t most = taken(parts->iov_len);
  struct iovec first = {parts->iov_base, most};
  return most < 0 ? -1 : next(fd, &first, 1);
}
