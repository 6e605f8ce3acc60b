/* Fails or kills at the n-th write to paths of a pattern, for tests: loaded before libc by LD_PRELOAD.

A write is whatever changes a file or a folder: open for writing, write, fsync, truncate, rename, mkdir. Python, PyTorch
and safetensors' Rust all call these functions. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <regex.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <unistd.h>

enum { SHORT = -1, KILL = -2 };

static regex_t pattern;
static int at = -1, fault, seen, notes = -1;

/* Arm: the write number n (from 1) to a path of this extended regular expression has the fault, an errno or SHORT or
KILL. n = 0 has none. A line for each write goes to the descriptor `log`. */
void arm(const char *paths, int n, int what, int log) {
  regcomp(&pattern, paths, REG_EXTENDED | REG_NOSUB);
  fault = what, seen = 0, notes = log, at = n;
}

static int below(const char *path) {
  char whole[8192];
  if (at < 0 || path == NULL) return 0;
  if (path[0] != '/') {
    if (!getcwd(whole, 4096)) return 0;
    strcat(whole, "/"), strncat(whole, path, 4000);
    path = whole;
  }
  return !regexec(&pattern, path, 0, NULL, 0);
}

static int open_below(int descriptor) {
  char link[64], path[4096];
  if (at < 0 || descriptor < 3 || descriptor == notes) return 0;
  snprintf(link, sizeof link, "/proc/self/fd/%d", descriptor);
  ssize_t length = readlink(link, path, sizeof path - 1);
  if (length <= 0) return 0;
  path[length] = 0;
  return below(path);
}

/* Whether this write has the fault. */
static int hit(const char *name, const char *path) {
  char line[4200];
  int number = __sync_add_and_fetch(&seen, 1);
  int length = snprintf(line, sizeof line, "%s %s\n", name, path);
  syscall(SYS_write, notes, line, length);
  if (number != at) return 0;
  if (fault == KILL && strcmp(name, "write")) kill(getpid(), SIGKILL);
  if (fault > 0) errno = fault;
  return 1;
}

static const char *name_of(int descriptor) {
  static __thread char path[4096];
  char link[64];
  snprintf(link, sizeof link, "/proc/self/fd/%d", descriptor);
  ssize_t length = readlink(link, path, sizeof path - 1);
  path[length > 0 ? length : 0] = 0;
  return path;
}

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))
#define WRITES(flags) ((flags) & (O_WRONLY | O_RDWR | O_CREAT))

#define OPEN(name)                                                                       \
  int name(const char *path, int flags, ...) {                                           \
    va_list more;                                                                        \
    va_start(more, flags);                                                               \
    mode_t mode = va_arg(more, mode_t);                                                  \
    va_end(more);                                                                        \
    if (WRITES(flags) && below(path) && hit("open", path) && fault > 0) return -1;       \
    return REAL(name)(path, flags, mode);                                                \
  }
OPEN(open)
OPEN(open64)

#define OPENAT(name)                                                                     \
  int name(int folder, const char *path, int flags, ...) {                               \
    va_list more;                                                                        \
    va_start(more, flags);                                                               \
    mode_t mode = va_arg(more, mode_t);                                                  \
    va_end(more);                                                                        \
    if (WRITES(flags) && below(path) && hit("open", path) && fault > 0) return -1;       \
    return REAL(name)(folder, path, flags, mode);                                        \
  }
OPENAT(openat)
OPENAT(openat64)

ssize_t write(int descriptor, const void *content, size_t size) {
  if (open_below(descriptor) && hit("write", name_of(descriptor))) {
    if (fault > 0) return -1;
    ssize_t part = REAL(write)(descriptor, content, size > 1 ? size / 2 : size);
    if (fault == KILL) kill(getpid(), SIGKILL);
    return part;
  }
  return REAL(write)(descriptor, content, size);
}

#define ONE(name, label)                                                                 \
  int name(int descriptor) {                                                             \
    if (open_below(descriptor) && hit(label, name_of(descriptor)) && fault > 0) return -1; \
    return REAL(name)(descriptor);                                                       \
  }
ONE(fsync, "fsync")
ONE(fdatasync, "fsync")

#define TRUNCATE(name)                                                                   \
  int name(int descriptor, off_t size) {                                                 \
    if (open_below(descriptor) && hit("truncate", name_of(descriptor)) && fault > 0) return -1; \
    return REAL(name)(descriptor, size);                                                 \
  }
TRUNCATE(ftruncate)
TRUNCATE(ftruncate64)

int rename(const char *from, const char *to) {
  if (below(to) && hit("rename", to) && fault > 0) return -1;
  return REAL(rename)(from, to);
}

int mkdir(const char *path, mode_t mode) {
  if (below(path) && hit("mkdir", path) && fault > 0) return -1;
  return REAL(mkdir)(path, mode);
}
