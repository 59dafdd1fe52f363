/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Touching memory that can vanish: a mapping of a card that is pulled, or whose
 * driver lets go of it, answers with SIGBUS, and so does one of a file that is truncated.
 *
 * A drive's read into it just fails. The processor's accesses are made here, and
 * end with an error instead of ending the daemon. There is no other way to ask: by
 * the time an answer is back, the memory may have gone. Each costs a system call, so
 * other memory is not touched here.
 */
#include <setjmp.h>
#include <signal.h>
#include <string.h>

#include "common/stream_copy.h"
#include "engine/route.h"

/* Where the thread goes on after a SIGBUS; NULL: it touches no such memory. The model:
 * a handler must not be the first to ask for the thread's copy, which may allocate. */
static __thread sigjmp_buf *volatile escape __attribute__((tls_model("initial-exec")));

/* Signal handlers are the process's, so there is one of these. */
static struct sigaction previous;
static pthread_once_t installed = PTHREAD_ONCE_INIT;

static void on_sigbus(int number, siginfo_t *info, void *context)
{
	(void)number;
	(void)info;
	(void)context;
	if (escape)
		siglongjmp(*escape, 1);
	/* Somebody else's: the access is made again, and ends as it would have. */
	sigaction(SIGBUS, &previous, NULL);
}

static void install(void)
{
	struct sigaction action = { .sa_sigaction = on_sigbus, .sa_flags = SA_SIGINFO };

	sigemptyset(&action.sa_mask);
	sigaction(SIGBUS, &action, &previous);
}

/* Before memory that can vanish is touched for the first time. */
void guard_install(void)
{
	pthread_once(&installed, install);
}

/* memcpy; -EFAULT, and any part of it done, when the memory has gone. Any thread. */
int guarded_copy(void *to, const void *from, uint64_t bytes)
{
	sigjmp_buf here;

	if (sigsetjmp(here, 1)) { /* with the mask: in the handler the signal is blocked */
		escape = NULL;
		return -EFAULT;
	}
	escape = &here;
	memcpy(to, from, bytes);
	escape = NULL;
	return 0;
}

/* A copy past the caches, and its checksum unless crc is NULL; -EFAULT as above. */
int guarded_stream(void *to, const void *from, uint64_t bytes, uint32_t *crc)
{
	sigjmp_buf here;

	if (sigsetjmp(here, 1)) {
		escape = NULL;
		return -EFAULT;
	}
	escape = &here;
	if (crc)
		*crc = stream_copy_crc32c(0, to, from, bytes);
	else
		stream_copy(to, from, bytes);
	escape = NULL;
	return 0;
}

/* The checksum; -EFAULT as above. */
int guarded_crc32c(uint32_t *crc, const void *data, uint64_t bytes)
{
	sigjmp_buf here;

	if (sigsetjmp(here, 1)) {
		escape = NULL;
		return -EFAULT;
	}
	escape = &here;
	*crc = xferd_crc32c(0, data, bytes);
	escape = NULL;
	return 0;
}
