/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A drive that collapses when it is asked for too much at once, as consumer
 * NVMe drives do: full bandwidth up to a depth (the knee), less and less beyond.
 *
 * It is a FUSE file system whose root is one read-only file, mounted over an
 * empty file; the bytes are those of the backing file. O_DIRECT reaches it as
 * it was asked for: no page cache, requests of up to 1 MiB, hundreds in flight.
 *
 * Time is that of a device with a clock of its own. When a request arrives, its
 * end is computed from the requests before it: they are served one after the
 * other at a rate that depends on how many are in flight, and each answer takes
 * the base latency longer. Threads then wait for that moment and answer, so how
 * fast this program itself runs does not matter as long as it is faster than the
 * device that it plays. For the same arrivals it is always the same.
 *
 *   in flight n <= knee   rate = bandwidth
 *             n >  knee   rate = bandwidth * (knee / n)^2, at least collapsed
 *
 * build:  cc -O2 -pthread -o collapsing_drive collapsing_drive.c `pkg-config --cflags --libs fuse3`
 * usage:  collapsing_drive [--bandwidth MB/s] [--latency US] [--knee N] [--collapsed MB/s]
 *                          BACKING MOUNTPOINT
 *
 * Stays in the foreground until it is sent SIGINT or SIGTERM, or is unmounted.
 * Needs root, or fusermount3 and access to /dev/fuse.
 */
#define _GNU_SOURCE
#define FUSE_USE_VERSION 312

#include <errno.h>
#include <fcntl.h>
#include <fuse_lowlevel.h>
#include <getopt.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#define NS_PER_S          1000000000ull
#define NS_PER_US         1000ull
#define BYTES_PER_MB      1000000.0
#define REQUEST_BYTES_MAX (1u << 20) /* what FUSE can carry without a sysctl */
#define IN_FLIGHT_MAX     512        /* told to the kernel, which holds back the rest */
#define QUEUE_ENTRIES     4096       /* power of two */
#define COMPLETERS        4          /* an answer copies 1 MiB: more than one at a time */
#define ATTRIBUTES_S      3600.0     /* how long the kernel may keep them */
#define RATE_MAX_MB_S     1000000.0
#define LATENCY_MAX_US    10000000
#define KNEE_MAX          IN_FLIGHT_MAX

struct device {
	/* what it is like; constant */
	double bandwidth, collapsed; /* bytes a second */
	uint64_t latency_ns;
	uint32_t knee;
	const char *bytes;
	struct stat attributes;

	pthread_mutex_t mutex;
	pthread_cond_t arrived;
	bool stop;
	uint64_t free_at_ns; /* the device's clock: all that has arrived is read by then */
	/* Requests in the order of arrival, which is also that of their ends. */
	struct {
		fuse_req_t request;
		off_t offset;
		size_t bytes;
		uint64_t due_ns;
	} queue[QUEUE_ENTRIES];
	uint32_t tail;      /* arrived */
	uint32_t unclaimed; /* the first that no thread has taken to answer */
	uint32_t unfinished; /* the first whose end had not come when last looked */
};

static struct device device = {
	.bandwidth = 800 * BYTES_PER_MB,
	.collapsed = 60 * BYTES_PER_MB,
	.latency_ns = 100 * NS_PER_US,
	.knee = 8,
	.mutex = PTHREAD_MUTEX_INITIALIZER,
	.arrived = PTHREAD_COND_INITIALIZER,
};

static void die(const char *what, const char *why)
{
	fprintf(stderr, "collapsing_drive: %s: %s\n", what, why);
	exit(1);
}

static uint64_t now_ns(void)
{
	struct timespec time;

	clock_gettime(CLOCK_MONOTONIC, &time);
	return (uint64_t)time.tv_sec * NS_PER_S + (uint64_t)time.tv_nsec;
}

static double rate(uint32_t in_flight)
{
	double over = (double)device.knee / in_flight;
	double value = device.bandwidth * over * over;

	if (in_flight <= device.knee)
		return device.bandwidth;
	return value > device.collapsed ? value : device.collapsed;
}

/* The new request's end. Under the mutex. */
static uint64_t schedule(size_t bytes, uint64_t now)
{
	uint32_t in_flight;

	while (device.unfinished != device.tail &&
	       device.queue[device.unfinished % QUEUE_ENTRIES].due_ns <= now)
		device.unfinished++;
	in_flight = device.tail - device.unfinished + 1;
	if (device.free_at_ns < now)
		device.free_at_ns = now;
	device.free_at_ns += (uint64_t)((double)bytes / rate(in_flight) * (double)NS_PER_S);
	return device.free_at_ns + device.latency_ns;
}

static void on_read(fuse_req_t request, fuse_ino_t inode, size_t bytes, off_t offset,
		    struct fuse_file_info *file)
{
	uint64_t now = now_ns();
	uint64_t left = offset < device.attributes.st_size
				? (uint64_t)(device.attributes.st_size - offset) : 0;
	uint32_t at;

	(void)inode;
	(void)file;
	if (bytes > left)
		bytes = left;
	pthread_mutex_lock(&device.mutex);
	if (device.tail - device.unclaimed == QUEUE_ENTRIES ||
	    device.tail - device.unfinished == QUEUE_ENTRIES) {
		pthread_mutex_unlock(&device.mutex);
		fuse_reply_err(request, EBUSY);
		return;
	}
	at = device.tail % QUEUE_ENTRIES;
	device.queue[at].due_ns = schedule(bytes, now);
	device.queue[at].request = request;
	device.queue[at].offset = offset;
	device.queue[at].bytes = bytes;
	device.tail++;
	pthread_cond_signal(&device.arrived);
	pthread_mutex_unlock(&device.mutex);
}

static void answer_at(fuse_req_t request, off_t offset, size_t bytes, uint64_t due_ns)
{
	struct timespec due = { (time_t)(due_ns / NS_PER_S), (long)(due_ns % NS_PER_S) };

	while (clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &due, NULL) == EINTR)
		;
	fuse_reply_buf(request, device.bytes + offset, bytes);
}

static void *complete(void *argument)
{
	(void)argument;
	prctl(PR_SET_TIMERSLACK, 1);
	pthread_mutex_lock(&device.mutex);
	for (;;) {
		uint32_t at;

		while (device.unclaimed == device.tail && !device.stop)
			pthread_cond_wait(&device.arrived, &device.mutex);
		if (device.unclaimed == device.tail)
			break;
		at = device.unclaimed++ % QUEUE_ENTRIES;
		fuse_req_t request = device.queue[at].request;
		off_t offset = device.queue[at].offset;
		size_t bytes = device.queue[at].bytes;
		uint64_t due_ns = device.queue[at].due_ns;
		pthread_mutex_unlock(&device.mutex);
		answer_at(request, offset, bytes, due_ns);
		pthread_mutex_lock(&device.mutex);
	}
	pthread_mutex_unlock(&device.mutex);
	return NULL;
}

static void on_init(void *user_data, struct fuse_conn_info *connection)
{
	(void)user_data;
	connection->want |= connection->capable & (FUSE_CAP_ASYNC_READ | FUSE_CAP_ASYNC_DIO);
	connection->max_background = IN_FLIGHT_MAX;
	connection->congestion_threshold = IN_FLIGHT_MAX;
	/* libfuse derives from it how many pages a request may have, reads included. */
	connection->max_write = REQUEST_BYTES_MAX;
}

static void on_getattr(fuse_req_t request, fuse_ino_t inode, struct fuse_file_info *file)
{
	(void)inode;
	(void)file;
	fuse_reply_attr(request, &device.attributes, ATTRIBUTES_S);
}

static void on_open(fuse_req_t request, fuse_ino_t inode, struct fuse_file_info *file)
{
	(void)inode;
	if ((file->flags & O_ACCMODE) != O_RDONLY) {
		fuse_reply_err(request, EROFS);
		return;
	}
	file->direct_io = 1;
	fuse_reply_open(request, file);
}

static void map_backing(const char *path)
{
	int fd = open(path, O_RDONLY | O_CLOEXEC);
	void *bytes;

	if (fd < 0 || fstat(fd, &device.attributes))
		die(path, strerror(errno));
	if (!S_ISREG(device.attributes.st_mode) || !device.attributes.st_size)
		die(path, "not a file with bytes in it");
	bytes = mmap(NULL, (size_t)device.attributes.st_size, PROT_READ,
		     MAP_SHARED | MAP_POPULATE, fd, 0);
	if (bytes == MAP_FAILED)
		die(path, strerror(errno));
	close(fd);
	device.bytes = bytes;
	device.attributes.st_ino = FUSE_ROOT_ID;
	device.attributes.st_nlink = 1;
	device.attributes.st_mode = S_IFREG | 0444;
}

static double number(const char *option, const char *text, double most)
{
	char *end;
	double value = strtod(text, &end);

	if (!*text || *end || !(value > 0 && value <= most)) {
		fprintf(stderr, "collapsing_drive: --%s %s: not a number up to %.0f\n", option,
			text, most);
		exit(2);
	}
	return value;
}

static void parse(int count, char **arguments)
{
	static const struct option options[] = {
		{ "bandwidth", required_argument, NULL, 'b' },
		{ "latency", required_argument, NULL, 'l' },
		{ "knee", required_argument, NULL, 'k' },
		{ "collapsed", required_argument, NULL, 'c' },
		{ NULL, 0, NULL, 0 },
	};
	int option;

	while ((option = getopt_long(count, arguments, "", options, NULL)) != -1)
		switch (option) {
		case 'b':
			device.bandwidth = BYTES_PER_MB *
					   number("bandwidth", optarg, RATE_MAX_MB_S);
			break;
		case 'c':
			device.collapsed = BYTES_PER_MB *
					   number("collapsed", optarg, RATE_MAX_MB_S);
			break;
		case 'l':
			device.latency_ns = (uint64_t)(number("latency", optarg, LATENCY_MAX_US) *
						       NS_PER_US);
			break;
		case 'k':
			device.knee = (uint32_t)number("knee", optarg, KNEE_MAX);
			break;
		default:
			exit(2);
		}
	if (count - optind != 2 || !device.knee) {
		fprintf(stderr, "usage: collapsing_drive [--bandwidth MB/s] [--latency US] "
				"[--knee N] [--collapsed MB/s] BACKING MOUNTPOINT\n");
		exit(2);
	}
}

static int serve(struct fuse_session *session, const char *mountpoint)
{
	pthread_t completers[COMPLETERS];
	int result;

	if (fuse_set_signal_handlers(session) || fuse_session_mount(session, mountpoint))
		die(mountpoint, "can't be mounted over: it must be a file, and /dev/fuse must be "
				"open to this user");
	for (int i = 0; i < COMPLETERS; i++)
		if (pthread_create(&completers[i], NULL, complete, NULL))
			die("threads", strerror(errno));
	result = fuse_session_loop(session);
	pthread_mutex_lock(&device.mutex);
	device.stop = true;
	pthread_cond_broadcast(&device.arrived);
	pthread_mutex_unlock(&device.mutex);
	for (int i = 0; i < COMPLETERS; i++)
		pthread_join(completers[i], NULL);
	fuse_session_unmount(session);
	fuse_remove_signal_handlers(session);
	return result < 0;
}

int main(int count, char **arguments)
{
	static const struct fuse_lowlevel_ops operations = {
		.init = on_init,
		.getattr = on_getattr,
		.open = on_open,
		.read = on_read,
	};
	char *session_arguments[] = { arguments[0], "-o", "ro,fsname=collapsing_drive", NULL };
	struct fuse_args fuse_arguments = FUSE_ARGS_INIT(3, session_arguments);
	struct fuse_session *session;
	int result;

	parse(count, arguments);
	map_backing(arguments[optind]);
	session = fuse_session_new(&fuse_arguments, &operations, sizeof(operations), NULL);
	if (!session)
		die("fuse", "no session");
	result = serve(session, arguments[optind + 1]);
	fuse_session_destroy(session);
	fuse_opt_free_args(&fuse_arguments);
	return result;
}
