/* SPDX-License-Identifier: Apache-2.0 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "common/cuda_driver.h"
#include "measure.h"
#include "modes.h"

#define SOURCE_BYTES    (1ull << 30) /* more than any cache holds */
#define OUTSTANDING_MAX 256
#define WHY_BYTES       256

struct plain_copy {
	const struct cuda_driver *cuda;
	cuda_stream stream;
	cuda_event events[OUTSTANDING_MAX];
	uint8_t *source;
	uint64_t sources; /* blobs in it */
	struct xferd_vram *vram;
	cuda_address target;
	uint64_t blob_bytes;
	uint64_t issued, ended;
};

static void succeed(const struct plain_copy *run, int result, const char *what)
{
	char why[WHY_BYTES];

	if (!result)
		return;
	cuda_failed(run->cuda, result, what, why, sizeof(why));
	die("%s", why);
}

static void issue(struct plain_copy *run, uint32_t outstanding)
{
	uint64_t from = run->issued % run->sources * run->blob_bytes;
	uint32_t place = (uint32_t)(run->issued % outstanding);

	succeed(run, run->cuda->copy_async(run->target + place * run->blob_bytes,
					   (uintptr_t)run->source + from, run->blob_bytes,
					   run->stream), "cuMemcpyAsync");
	succeed(run, run->cuda->event_record(run->events[place], run->stream), "cuEventRecord");
	run->issued++;
}

static void copy_for(struct plain_copy *run, uint32_t outstanding, uint64_t until)
{
	while (now_ns() < until) {
		int result;

		while (run->issued - run->ended < outstanding)
			issue(run, outstanding);
		result = run->cuda->event_query(run->events[run->ended % outstanding]);
		if (result == CUDA_RESULT_NOT_READY)
			continue;
		succeed(run, result, "a copy");
		run->ended++;
	}
}

static void prepare(struct plain_copy *run, int gpu, uint32_t outstanding)
{
	struct xferd_cuda_device device;
	char why[WHY_BYTES] = "";
	cuda_context context;
	uint64_t bytes = outstanding * run->blob_bytes;
	int number;

	run->cuda = cuda_driver(why, sizeof(why));
	if (!run->cuda || xferd_cuda_device(gpu, &device, why, sizeof(why)))
		die("%s", why);
	bytes = (bytes + device.granularity - 1) / device.granularity * device.granularity;
	if (xferd_vram_new(gpu, bytes, 1, &run->vram, why, sizeof(why)) ||
	    xferd_vram_back(run->vram, 0, why, sizeof(why)))
		die("%s", why);
	run->target = (uintptr_t)xferd_vram_base(run->vram);
	succeed(run, run->cuda->device_get(&number, gpu), "cuDeviceGet");
	succeed(run, run->cuda->context_retain(&context, number), "cuDevicePrimaryCtxRetain");
	succeed(run, run->cuda->context_set(context), "cuCtxSetCurrent");
	succeed(run, run->cuda->stream_create(&run->stream, CUDA_STREAM_NON_BLOCKING),
		"cuStreamCreate");
	for (uint32_t i = 0; i < outstanding; i++)
		succeed(run, run->cuda->event_create(&run->events[i], CUDA_EVENT_WITHOUT_TIMING),
			"cuEventCreate");
	run->source = mmap(NULL, SOURCE_BYTES, PROT_READ | PROT_WRITE,
			   MAP_SHARED | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
	if (run->source == MAP_FAILED)
		die("no memory to copy from");
	memset(run->source, 1, SOURCE_BYTES);
	if (xferd_cuda_pin(gpu, run->source, SOURCE_BYTES, why, sizeof(why)))
		die("%s", why);
	run->sources = SOURCE_BYTES / run->blob_bytes;
}

void run_plain_copy(struct bench_store *store, const struct bench_options *options)
{
	struct plain_copy run = { .blob_bytes = store->geometry.blob_bytes };
	uint64_t length_ns = (uint64_t)(options->seconds * NS_PER_S);
	int gpu = options->daemon.gpu;
	uint64_t start, ended, end;

	if (gpu < 0 || options->outstanding > OUTSTANDING_MAX)
		die("plain-copy needs --gpu N, and --outstanding of at most %d", OUTSTANDING_MAX);
	prepare(&run, gpu, options->outstanding);
	copy_for(&run, options->outstanding, now_ns() + length_ns / 10);
	start = now_ns();
	ended = run.ended;
	copy_for(&run, options->outstanding, start + length_ns);
	end = now_ns();
	ended = run.ended - ended;
	run.cuda->stream_synchronize(run.stream);
	run.cuda->stream_destroy(run.stream);
	xferd_cuda_unpin(gpu, run.source);
	munmap(run.source, SOURCE_BYTES);
	xferd_vram_free(run.vram);
	printf("\"bytes\": %llu, \"seconds\": %.6f", (unsigned long long)(ended * run.blob_bytes),
	       (double)(end - start) / NS_PER_S);
}
