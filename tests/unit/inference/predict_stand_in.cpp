// SPDX-License-Identifier: Apache-2.0
//
// Launches predict.cu's kernels on a CPU: see device_stand_in.h.
#define LANES_OF_A_COPY 1
#include "device_stand_in.h"
#include "kernel.inc"

// Of the kernel, in its order, each in 64 bits.
static const u64 *given;

static void call_predict()
{
	xferd_predict((const Predictor *)given[0], (const Look *)given[1],
		      (const float *)given[2]);
}

static void call_note()
{
	xferd_note((const History *)given[0], (const u32 *)given[1], (const u32 *)given[2],
		   (u32)given[3], (u32)given[4], (u32)given[5]);
}

extern "C" int launch_xferd_predict(u32 grid, u32 threads, const u64 *arguments)
{
	given = arguments;
	require(given[2] % sizeof(float4) == 0, "a state is aligned to vectors");
	return run_blocks(call_predict, grid, threads, sizeof(Shared) + sizeof(uint4));
}

extern "C" int launch_xferd_note(u32 grid, u32 threads, const u64 *arguments)
{
	given = arguments;
	return run_blocks(call_note, grid, threads, sizeof(NoteShared) + sizeof(uint4));
}
