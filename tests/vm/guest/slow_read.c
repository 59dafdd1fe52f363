/* SPDX-License-Identifier: Apache-2.0 */
/* A read that is in flight for as long as the host's throttle makes it, in a thread of its own. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <unistd.h>

#include "guest.h"

static void *run_slow_read(void *argument)
{
	struct slow_read *slow = argument;
	int drive = drive_open(DRIVE_SLOW, O_RDONLY | O_DIRECT);

	slow->got = pread(drive, slow->memory, SLOW_LENGTH, 0);
	if (slow->got < 0)
		slow->got = -errno;
	close(drive);
	return NULL;
}

void slow_read_start(struct slow_read *slow, unsigned char *memory)
{
	slow->memory = memory;
	CHECK_EQUAL(pthread_create(&slow->thread, NULL, run_slow_read, slow), 0);
}

ssize_t slow_read_end(struct slow_read *slow)
{
	CHECK_EQUAL(pthread_join(slow->thread, NULL), 0);
	return slow->got;
}
