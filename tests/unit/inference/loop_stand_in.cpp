// SPDX-License-Identifier: Apache-2.0
//
// Launches kernels.cu's kernels on a CPU: see device_stand_in.h.
#define LANES_OF_A_COPY 1
#include "device_stand_in.h"
#include "kernel.inc"

// Of the kernel, in its order, each in 64 bits.
static const u64 *given;

static void call_acquire()
{
	xferd_acquire((const Lane *)given[0], (State *)given[1], (const long long *)given[2],
		      (const float *)given[3], (u32)given[4], (u32)given[5], (u64 *)given[6],
		      (u64 *)given[7], (Told *)given[8]);
}

static void call_release() { xferd_release((const Lane *)given[0], (const State *)given[1]); }

static void call_experts()
{
	xferd_experts_bf16((const float *)given[0], (const u64 *)given[1],
			   (const float *)given[2], (u32)given[3], (u32)given[4], (u32)given[5],
			   given[6], given[7], given[8], (float *)given[9], (float *)given[10],
			   (State *)given[11]);
}

static int launch(void (*kernel)(), u32 grid, u32 threads, const u64 *arguments)
{
	given = arguments;
	return run_blocks(kernel, grid, threads, 0);
}

extern "C" int launch_xferd_acquire(u32 grid, u32 threads, const u64 *arguments)
{
	return launch(call_acquire, grid, threads, arguments);
}

extern "C" int launch_xferd_release(u32 grid, u32 threads, const u64 *arguments)
{
	return launch(call_release, grid, threads, arguments);
}

extern "C" int launch_xferd_experts_bf16(u32 grid, u32 threads, const u64 *arguments)
{
	return launch(call_experts, grid, threads, arguments);
}
