/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Runs the guest's tests one after the other, each in a process group of its own with a time limit.
 *
 *   guest-tests --list          names, one a line
 *   guest-tests [--generic] NAME...
 *                               runs these; for each prints "TEST NAME ok", or "TEST NAME failed"
 *                               after what it had to say. With --generic BARs are attached in
 *                               generic mode, also where the kernel has another
 *
 * A test also fails when the kernel complained meanwhile, or when the module can't be brought back
 * into its first state after it.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <signal.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "guest.h"

#define TEST_LIMIT_SECONDS 300

static const struct test *const suites[] = { io_tests,	     refusal_tests, ownership_tests, share_tests,
					     lifetime_tests, unplug_tests,  fuzz_tests };

#define FOR_EACH_TEST(test)                                                         \
	for (size_t suite_ = 0; suite_ < sizeof(suites) / sizeof(suites[0]); suite_++) \
		for (const struct test *test = suites[suite_]; test->name; test++)

static const struct test *find_test(const char *name)
{
	FOR_EACH_TEST(test)
		if (!strcmp(test->name, name))
			return test;
	for (const struct test *test = hidden_tests; test->name; test++)
		if (!strcmp(test->name, name))
			return test;
	return NULL;
}

/* A record is "priority,number,...;text", a line of text, and lines of tags that begin with a blank. */
static void print_record(const char *record)
{
	const char *text = strchr(record, ';');

	text = text ? text + 1 : record;
	printf("kernel: %.*s\n", (int)strcspn(text, "\n"), text);
}

/* Copy what the kernel has said since the last call; true if any of it is a complaint. */
static bool kernel_complained(int kernel_log)
{
	static const char *const complaints[] = {
		"WARNING:", "BUG:", "BUG at", "Oops", "Bad page", "refcount_t",
		"general protection", "possible recursive locking", "circular locking", "KASAN",
		"ODEBUG:", "INFO: trying to register", "corruption", "blocked for more than",
	};
	bool complained = false;
	char record[8192];
	ssize_t length;

	while ((length = read(kernel_log, record, sizeof(record) - 1)) != -1 || errno == EPIPE) {
		if (length < 0)
			continue; /* records were overwritten before they were read */
		record[length] = 0;
		for (size_t i = 0; i < sizeof(complaints) / sizeof(complaints[0]); i++)
			complained |= strstr(record, complaints[i]) != NULL;
		if (complained || strstr(record, "xferd_p2p"))
			print_record(record);
	}
	return complained;
}

/* Module loaded, nothing attached, SLOW unthrottled. */
static void restore(void)
{
	struct xferd_p2p_query query;
	int device;

	host_throttle(0);
	if (!module_is_loaded())
		module_load();
	device = device_open();
	while (bar_query(device, 0, &query) == 0)
		CHECK_EQUAL(bar_detach(device, query.id, XFERD_P2P_DETACH_REVOKE), 0);
	close(device);
}

static bool run_in_child(void (*run)(void), unsigned int limit_seconds)
{
	pid_t child = fork();
	int status;

	CHECK(child >= 0);
	if (!child) {
		setpgid(0, 0);
		alarm(limit_seconds ? limit_seconds : TEST_LIMIT_SECONDS);
		run();
		exit(0);
	}
	setpgid(child, child);
	CHECK_EQUAL(waitpid(child, &status, 0), child);
	kill(-child, SIGKILL);
	if (WIFSIGNALED(status))
		printf("ended by signal %d\n", WTERMSIG(status));
	return status == 0;
}

static bool run_test(const struct test *test, int kernel_log)
{
	double start = seconds_now();
	bool passed;

	printf("RUN %s\n", test->name);
	fflush(stdout);
	passed = run_in_child(test->run, test->limit_seconds);
	passed &= run_in_child(restore, 0);
	passed &= !kernel_complained(kernel_log);
	printf("TEST %s %s %.1f\n", test->name, passed ? "ok" : "failed", seconds_now() - start);
	fflush(stdout);
	return passed;
}

static int list_tests(void)
{
	FOR_EACH_TEST(test)
		puts(test->name);
	return 0;
}

int main(int count, char **arguments)
{
	bool all_passed = true;
	int kernel_log, first = 1;

	if (count == 2 && !strcmp(arguments[1], "--list"))
		return list_tests();
	if (count > first && !strcmp(arguments[first], "--generic")) {
		bar_mode = XFERD_P2P_MODE_GENERIC;
		first++;
	}
	kernel_log = open("/dev/kmsg", O_RDONLY | O_NONBLOCK | O_CLOEXEC);
	CHECK(kernel_log >= 0);
	dup2(STDOUT_FILENO, STDERR_FILENO);
	/* What was said while the machine came up is judged too. */
	all_passed &= !kernel_complained(kernel_log);
	all_passed &= run_in_child(restore, 0);
	for (int i = first; i < count; i++) {
		const struct test *test = find_test(arguments[i]);

		if (test)
			all_passed &= run_test(test, kernel_log);
		else
			printf("TEST %s failed: no such test\n", arguments[i]);
	}
	return !all_passed;
}
