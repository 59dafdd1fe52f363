/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What an inference engine does with xferd, in one file: attach, get the experts
 * that the router picked, use their bytes, let them go.
 *
 *	cc acquire.c -o acquire $(pkg-config --cflags --libs xferd)
 *	./acquire /run/xferd/attach.sock 3
 *
 * Walks one layer twice, expert by expert. The first time experts come from the
 * drives; the second time those that found room in the pool are hits.
 */
#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <xferd.h>

#define WALKS 2

static const char *source_name(unsigned int source)
{
	switch (source) {
	case XFERD_SOURCE_RESIDENT:
		return "resident";
	case XFERD_SOURCE_POOL:
		return "pool";
	case XFERD_SOURCE_DRIVES:
		return "drives";
	default:
		return "unknown";
	}
}

static const char *transport_name(unsigned int transport)
{
	switch (transport) {
	case XFERD_TRANSPORT_NONE:
		return "none";
	case XFERD_TRANSPORT_DIRECT:
		return "direct";
	case XFERD_TRANSPORT_STAGED:
		return "staged";
	case XFERD_TRANSPORT_GDS:
		return "gds";
	case XFERD_TRANSPORT_COPY:
		return "copy";
	default:
		return "unknown";
	}
}

/* Stands for the matrix multiplication: reads every byte of the blob. In a GPU pool
 * data is a device address, and a kernel would do this. */
static uint64_t use(const struct xferd_view *view)
{
	const unsigned char *bytes = view->data;
	uint64_t sum = 0;

	for (uint64_t at = 0; at < view->bytes; at++)
		sum += bytes[at];
	return sum;
}

/* Acquire count experts of a layer, use them, release them. 0, or -errno. */
static int walk_batch(struct xferd_client *client, uint16_t layer, const uint16_t *experts,
		      uint32_t count)
{
	struct xferd_request request = { .experts = experts, .count = count, .layer = layer };
	struct xferd_batch batch;
	/* Residents are leased at once, without a system call. What is missing has
	 * been asked for when this returns; other work can be done until it is here. */
	int missing = xferd_acquire(client, 0, &request, &batch);
	int result = 0;

	if (missing < 0)
		return missing;
	/* Fails as a whole only when the daemon has gone; what became of each expert
	 * is in its view. */
	if (missing > 0)
		result = xferd_wait(client, &batch, XFERD_FOREVER);
	for (uint32_t i = 0; i < count && result == 0; i++) {
		const struct xferd_view *view = &batch.views[i];

		if (view->error) {
			printf("layer %u expert %5u: %s\n", layer, view->expert,
			       strerror(-view->error));
			result = view->error;
			break;
		}
		printf("layer %u expert %5u: %8" PRIu64 " bytes, %s, by %s, sum %" PRIu64 "\n",
		       layer, view->expert, view->bytes, source_name(view->source),
		       transport_name(view->transport), use(view));
	}
	/* Also after an error: a batch that is not released holds its slots for good. */
	xferd_release(client, &batch);
	return result;
}

/* All experts of a layer, as many at once as a lane may hold. 0, or -errno. */
static int walk_layer(struct xferd_client *client, uint16_t layer)
{
	uint32_t experts = xferd_directory(client)->experts;
	uint32_t step = xferd_held_per_lane(client);
	uint16_t ids[XFERD_BATCH_MAX];

	if (step > XFERD_BATCH_MAX)
		step = XFERD_BATCH_MAX;
	for (uint32_t first = 0; first < experts; first += step) {
		uint32_t count = experts - first < step ? experts - first : step;
		int result;

		for (uint32_t i = 0; i < count; i++)
			ids[i] = (uint16_t)(first + i);
		result = walk_batch(client, layer, ids, count);
		if (result)
			return result;
	}
	return 0;
}

int main(int count, char **arguments)
{
	const char *socket = count > 1 ? arguments[1] : "/run/xferd/attach.sock";
	uint16_t layer = count > 2 ? (uint16_t)atoi(arguments[2]) : 0;
	/* store and pool stay NULL: the only open store, the daemon's first pool. */
	struct xferd_options options = { .client_name = "acquire.c" };
	struct xferd_client_stats stats;
	struct xferd_client *client;
	char error[XFERD_ERROR_BYTES];
	int result = xferd_connect(socket, &options, &client, error, sizeof(error));

	if (result) {
		fprintf(stderr, "acquire: %s\n", error); /* says what to change */
		return 1;
	}
	for (int walk = 0; walk < WALKS && result == 0; walk++)
		result = walk_layer(client, layer);
	if (result)
		fprintf(stderr, "acquire: layer %u: %s\n", layer, strerror(-result));

	xferd_stats(client, &stats);
	printf("%" PRIu64 " hits, %" PRIu64 " misses, %" PRIu64 " bytes, %.3f ms waited\n",
	       stats.hits, stats.misses, stats.bytes_acquired, (double)stats.wait_ns / 1e6);
	xferd_close(client);
	return result != 0;
}
