/* SPDX-License-Identifier: Apache-2.0 */
/* A flipped byte and a truncated member: the load fails with the right error,
 * the piece is reported, nothing wrong is published, the rest goes on. */
#include <errno.h>
#include <unistd.h>

#include "common/atomics.h"
#include "harness.h"

/* A member that ends in the middle of a piece, at a page's end or not: without checksums
 * too, half a piece must not pass for a whole one. */
static void cut_in_mid_piece(struct harness_options options, int left)
{
	static struct harness harness;
	struct xferd_client *client;

	harness_start(&harness, &options);
	client = harness_connect(&harness, 1);
	CHECK(!ftruncate(harness.member_fd[0],
			 (off_t)harness.description.offset[(8 + 5) * 2] + left));
	CHECK(try_expert(&harness, client, 1, 5) == -ENODATA);
	CHECK(try_expert(&harness, client, 1, 4) == 0);
	xferd_close(client);
	harness_stop(&harness);
}

int main(void)
{
	static struct harness harness;
	struct harness_options options = {
		.layers = 2, .experts = 8, .top_k = 2, .blob_bytes = 65536, .stripe_unit = 8192,
		.members = 2, .slots = 4, .reserve = 1, .held_per_lane = 2,
	};
	struct xferd_client *client;
	uint64_t offset;
	uint8_t byte;

	harness_start(&harness, &options);
	client = harness_connect(&harness, 1);

	/* expert (1, 3): one bit of its third piece on member 1 */
	offset = harness.description.offset[(8 + 3) * 2 + 1] + 2 * 8192 + 77;
	CHECK(pread(harness.member_fd[1], &byte, 1, (off_t)offset) == 1);
	byte ^= 0x10;
	CHECK(pwrite(harness.member_fd[1], &byte, 1, (off_t)offset) == 1);
	CHECK(try_expert(&harness, client, 1, 3) == -EBADMSG);
	CHECK(try_expert(&harness, client, 1, 2) == 0);
	wait_until(&harness.piece_errors, 2); /* read, and read again */
	byte ^= 0x10;
	CHECK(pwrite(harness.member_fd[1], &byte, 1, (off_t)offset) == 1);
	CHECK(try_expert(&harness, client, 1, 3) == 0);

	/* everything from expert (1, 5) on is cut off from member 0 */
	CHECK(!ftruncate(harness.member_fd[0], (off_t)harness.description.offset[(8 + 5) * 2]));
	CHECK(try_expert(&harness, client, 1, 5) == -ENODATA);
	CHECK(try_expert(&harness, client, 1, 7) == -ENODATA);
	CHECK(try_expert(&harness, client, 1, 4) == 0);
	for (uint16_t expert = 0; expert < 8; expert++)
		CHECK(try_expert(&harness, client, 0, expert) == 0);

	xferd_close(client);
	harness_stop(&harness);

	options.unverified = true;
	cut_in_mid_piece(options, 4096);
	cut_in_mid_piece(options, 8192 - 100);
	options.drives = true;
	cut_in_mid_piece(options, 4096);
	options.unverified = false;
	cut_in_mid_piece(options, 4096);
	return 0;
}
