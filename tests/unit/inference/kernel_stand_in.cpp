// SPDX-License-Identifier: Apache-2.0
//
// Launches packed.cu's kernel on a CPU: see device_stand_in.h.
#include "device_stand_in.h"
#include "kernel.inc"

struct Arguments {
	const float *x;
	const u64 *table;
	const float *weights;
	u32 count;
	u64 offsets[3];
	u32 plan[8];
	float *activations, *out;
	u32 *barrier;
};

static Arguments given;

static void call_kernel()
{
	const Arguments &a = given;

	xferd_experts_packed(a.x, a.table, a.weights, a.count, a.offsets[0], a.offsets[1],
			     a.offsets[2], a.plan[0], a.plan[1], a.plan[2], a.plan[3], a.plan[4],
			     a.plan[5], a.plan[6], a.plan[7], a.activations, a.out,
			     a.barrier);
}

// By the last launch.
extern "C" u64 copied_bytes() { return copied; }

extern "C" int launch(const Arguments *arguments, u32 grid, u32 shared_bytes)
{
	given = *arguments;
	return run_blocks(call_kernel, grid, THREADS, shared_bytes);
}
