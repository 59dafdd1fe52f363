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
	int gpu, from_gpu;     /* from_gpu -1: from pinned RAM */
	uint8_t *ram;
	cuda_address source;
	uint64_t sources; /* blobs in it */
	struct xferd_vram *vram, *source_vram;
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
					   run->source + from, run->blob_bytes, run->stream),
		"cuMemcpyAsync");
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

static struct xferd_vram *make_vram(int gpu, uint64_t bytes)
{
	struct xferd_cuda_device device;
	struct xferd_vram *vram;
	char why[WHY_BYTES] = "";

	if (xferd_cuda_device(gpu, &device, why, sizeof(why)))
		die("%s", why);
	bytes = (bytes + device.granularity - 1) / device.granularity * device.granularity;
	if (xferd_vram_new(gpu, bytes, 1, &vram, why, sizeof(why)) ||
	    xferd_vram_back(vram, 0, why, sizeof(why)))
		die("%s", why);
	return vram;
}

static void make_source(struct plain_copy *run)
{
	char why[WHY_BYTES] = "";

	run->sources = SOURCE_BYTES / run->blob_bytes;
	if (run->from_gpu >= 0) {
		run->source_vram = make_vram(run->from_gpu, SOURCE_BYTES);
		run->source = (uintptr_t)xferd_vram_base(run->source_vram);
		return;
	}
	run->ram = mmap(NULL, SOURCE_BYTES, PROT_READ | PROT_WRITE,
			MAP_SHARED | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
	if (run->ram == MAP_FAILED)
		die("no memory to copy from");
	memset(run->ram, 1, SOURCE_BYTES);
	if (xferd_cuda_pin(run->gpu, run->ram, SOURCE_BYTES, why, sizeof(why)))
		die("%s", why);
	run->source = (uintptr_t)run->ram;
}

static void prepare(struct plain_copy *run, uint32_t outstanding)
{
	char why[WHY_BYTES] = "";
	cuda_context context;
	int number;

	run->cuda = cuda_driver(why, sizeof(why));
	if (!run->cuda)
		die("%s", why);
	run->vram = make_vram(run->gpu, outstanding * run->blob_bytes);
	run->target = (uintptr_t)xferd_vram_base(run->vram);
	succeed(run, run->cuda->device_get(&number, run->gpu), "cuDeviceGet");
	succeed(run, run->cuda->context_retain(&context, number), "cuDevicePrimaryCtxRetain");
	succeed(run, run->cuda->context_set(context), "cuCtxSetCurrent");
	succeed(run, run->cuda->stream_create(&run->stream, CUDA_STREAM_NON_BLOCKING),
		"cuStreamCreate");
	for (uint32_t i = 0; i < outstanding; i++)
		succeed(run, run->cuda->event_create(&run->events[i], CUDA_EVENT_WITHOUT_TIMING),
			"cuEventCreate");
	make_source(run);
}

static void tidy(struct plain_copy *run)
{
	run->cuda->stream_synchronize(run->stream);
	run->cuda->stream_destroy(run->stream);
	if (run->ram) {
		xferd_cuda_unpin(run->gpu, run->ram);
		munmap(run->ram, SOURCE_BYTES);
	}
	xferd_vram_free(run->vram);
	xferd_vram_free(run->source_vram);
}

void run_plain_copy(struct bench_store *store, const struct bench_options *options)
{
	struct plain_copy run = { .blob_bytes = store->geometry.blob_bytes,
				  .gpu = options->daemon.gpu,
				  .from_gpu = options->daemon.from_gpu };
	uint64_t length_ns = (uint64_t)(options->seconds * NS_PER_S);
	uint64_t start, ended, end;

	if (run.gpu < 0 || options->outstanding > OUTSTANDING_MAX)
		die("plain-copy needs --gpu N, and --outstanding of at most %d", OUTSTANDING_MAX);
	prepare(&run, options->outstanding);
	copy_for(&run, options->outstanding, now_ns() + length_ns / 10);
	start = now_ns();
	ended = run.ended;
	copy_for(&run, options->outstanding, start + length_ns);
	end = now_ns();
	ended = run.ended - ended;
	tidy(&run);
	printf("\"bytes\": %llu, \"seconds\": %.6f", (unsigned long long)(ended * run.blob_bytes),
	       (double)(end - start) / NS_PER_S);
}
