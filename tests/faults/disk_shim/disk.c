/* Notes what a power loss would leave of the files of a server.
 *
 * Preloaded, it stands between the server and libc and appends one line to QIM_DISK_FOLDER/log for everything
 * that became durable, after it has and before the server learns it:
 *
 *     file <inode> <bytes>          a flush of the file has finished; so much of it had been written before
 *     durable <name>=<inode> ...    a flush of the folder has finished; these were its names before
 *     names <name>=<inode> ...      names changed and are not flushed; they may survive or not
 *
 * Of folders only the one called QIM_DISK_NAME is of interest, files may move into it. Each file is linked into
 * QIM_DISK_FOLDER/kept under its inode before its first flush, so that it outlives its name: its content at any
 * moment of the past is its begin, because the server only ever appends. sync_file_range promises nothing and is
 * not noted.
 */
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define LINE_BYTES 4096

static int (*real_fsync)(int);
static int (*real_fdatasync)(int);
static int (*real_rename)(const char *, const char *);
static int (*real_unlink)(const char *);
static const char *folder, *watched;

static const char *copy_of(const char *text) { return text == NULL ? NULL : strdup(text); }

__attribute__((constructor)) static void begin(void) {
    real_fsync = (int (*)(int))dlsym(RTLD_NEXT, "fsync");
    real_fdatasync = (int (*)(int))dlsym(RTLD_NEXT, "fdatasync");
    real_rename = (int (*)(const char *, const char *))dlsym(RTLD_NEXT, "rename");
    real_unlink = (int (*)(const char *))dlsym(RTLD_NEXT, "unlink");
    /* Copied: a server that changes its title writes over its environment. */
    folder = copy_of(getenv("QIM_DISK_FOLDER"));
    watched = copy_of(getenv("QIM_DISK_NAME"));
}

/* One write, so that lines of several threads and processes never mix. */
static void note(const char *line) {
    char path[PATH_MAX];
    snprintf(path, sizeof path, "%s/log", folder);
    int log = open(path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
    if (log < 0 || write(log, line, strlen(line)) < 0)
        abort();
    close(log);
}

/* Whether the last part of the first `length` bytes of a path, absolute or not, is this name. */
static int is_called(const char *path, size_t length, const char *name) {
    size_t wanted = strlen(name);
    if (length < wanted || strncmp(path + length - wanted, name, wanted) != 0)
        return 0;
    return length == wanted || path[length - wanted - 1] == '/';
}

static int is_watched_folder(const char *path) { return is_called(path, strlen(path), watched); }

static int is_in_watched_folder(const char *path) {
    const char *last = strrchr(path, '/');
    return last != NULL && is_called(path, (size_t)(last - path), watched);
}

static int path_of(int file, char *path) {
    char link[64];
    snprintf(link, sizeof link, "/proc/self/fd/%d", file);
    ssize_t length = readlink(link, path, PATH_MAX - 1);
    if (length < 0)
        return 0;
    path[length] = 0;
    return 1;
}

/* "<word> name=inode ...", whole or not at all. */
static void list_names(const char *path, const char *word, char *line) {
    size_t used = (size_t)snprintf(line, LINE_BYTES, "%s", word);
    DIR *listing = opendir(path);
    struct dirent *entry;
    while (listing != NULL && (entry = readdir(listing)) != NULL) {
        if (entry->d_name[0] == '.')
            continue;
        used += (size_t)snprintf(line + used, LINE_BYTES - used, " %s=%lu", entry->d_name, entry->d_ino);
        if (used >= LINE_BYTES - 2)
            abort();
    }
    if (listing != NULL)
        closedir(listing);
    line[used] = '\n';
    line[used + 1] = 0;
}

static void keep(int file, unsigned long inode) {
    char from[64], to[PATH_MAX];
    snprintf(from, sizeof from, "/proc/self/fd/%d", file);
    snprintf(to, sizeof to, "%s/kept/%lu", folder, inode);
    if (linkat(AT_FDCWD, from, AT_FDCWD, to, AT_SYMLINK_FOLLOW) != 0 && errno != EEXIST && errno != ENOENT)
        abort();
}

static int flush(int file, int (*really)(int)) {
    char path[PATH_MAX], line[LINE_BYTES];
    struct stat before;
    if (really == NULL)
        begin(), really = real_fdatasync;
    if (folder == NULL || watched == NULL || fstat(file, &before) != 0 || !path_of(file, path))
        return really(file);
    if (S_ISDIR(before.st_mode) && is_watched_folder(path)) {
        list_names(path, "durable", line);
    } else if (S_ISREG(before.st_mode)) {
        keep(file, before.st_ino);
        snprintf(line, sizeof line, "file %lu %lld\n", before.st_ino, (long long)before.st_size);
    } else {
        return really(file);
    }
    int code = really(file);
    int reason = errno;
    if (code == 0)
        note(line);
    errno = reason;
    return code;
}

int fsync(int file) { return flush(file, real_fsync); }

int fdatasync(int file) { return flush(file, real_fdatasync); }

static void note_names(const char *changed) {
    char path[PATH_MAX], line[LINE_BYTES];
    int reason = errno;
    if (folder == NULL || watched == NULL || !is_in_watched_folder(changed))
        return;
    snprintf(path, sizeof path, "%.*s", (int)(strrchr(changed, '/') - changed), changed);
    list_names(path, "names", line);
    note(line);
    errno = reason;
}

int rename(const char *from, const char *to) {
    int code = real_rename(from, to);
    if (code == 0)
        note_names(to);
    return code;
}

int unlink(const char *path) {
    int code = real_unlink(path);
    if (code == 0)
        note_names(path);
    return code;
}
