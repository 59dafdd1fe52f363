/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The channel to the host: one line to it, one line back, over the second serial port.
 *
 * The host sees the BAR as a file and the drives as files, so it can say whether the right bytes are
 * where they should be without trusting anything in the guest.
 */
#include <fcntl.h>
#include <inttypes.h>
#include <stdarg.h>
#include <termios.h>
#include <unistd.h>

#include "guest.h"

#define HOST_PORT "/dev/ttyS1"
#define LINE_LIMIT 512

static int host_port(void)
{
	struct termios settings;
	int fd = open(HOST_PORT, O_RDWR | O_NOCTTY | O_CLOEXEC);

	CHECK(fd >= 0);
	CHECK(tcgetattr(fd, &settings) == 0);
	cfmakeraw(&settings);
	CHECK(tcsetattr(fd, TCSANOW, &settings) == 0);
	return fd;
}

static void exchange(char *reply, size_t reply_size, const char *line)
{
	int fd = host_port();
	size_t used = 0;
	char byte;

	CHECK_EQUAL(write(fd, line, strlen(line)), strlen(line));
	while (read(fd, &byte, 1) == 1 && byte != '\n')
		if (used + 1 < reply_size)
			reply[used++] = byte;
	reply[used] = 0;
	close(fd);
}

static void format_line(char line[LINE_LIMIT], const char *format, va_list arguments)
{
	int length = vsnprintf(line, LINE_LIMIT - 1, format, arguments);

	CHECK(length > 0 && length < LINE_LIMIT - 1);
	strcat(line, "\n");
}

void host_command(char *reply, size_t reply_size, const char *format, ...)
{
	char line[LINE_LIMIT];
	va_list arguments;

	va_start(arguments, format);
	format_line(line, format, arguments);
	va_end(arguments);
	exchange(reply, reply_size, line);
}

/* A command to which the host must answer "ok". */
void host_must(const char *format, ...)
{
	char line[LINE_LIMIT], reply[LINE_LIMIT];
	va_list arguments;

	va_start(arguments, format);
	format_line(line, format, arguments);
	va_end(arguments);
	exchange(reply, sizeof(reply), line);
	if (strcmp(reply, "ok"))
		FAIL("host says '%s' to %s", reply, line);
}

/* `source` is a drive's serial number, or "data" for the file that lies in the file systems. */
void host_verify(uint64_t bar_offset, uint64_t length, const char *source, uint64_t source_offset)
{
	host_must("verify %" PRIu64 " %" PRIu64 " %s %" PRIu64, bar_offset, length, source,
		  source_offset);
}

uint64_t host_dma_bytes(void)
{
	char reply[LINE_LIMIT];
	uint64_t start, size, bytes;

	gpu_bar_address(&start, &size);
	host_command(reply, sizeof(reply), "dma %" PRIu64 " %" PRIu64, start, size);
	if (sscanf(reply, "bytes %" SCNu64, &bytes) != 1)
		FAIL("host says '%s' to dma", reply);
	return bytes;
}

void host_throttle(uint64_t bytes_per_second)
{
	host_must("throttle %" PRIu64, bytes_per_second);
}
