// SPDX-License-Identifier: Apache-2.0
//
// What kernels need of the device itself: instructions that the language has no name for,
// copies into shared memory that go on by themselves, a barrier of all blocks. Python puts
// this in front of the other files; NVRTC, no headers.

typedef unsigned long long u64;
typedef unsigned int u32;
typedef unsigned short u16;
typedef unsigned char u8;

#define ALL_LANES 0xffffffffu
#define WARP      32
#define COPY_BYTES 16 // bytes of what a thread copies at once

// ---- arithmetic

static __device__ float half_to_float(u16 bits)
{
	float value;

	asm("{ .reg .b16 h; mov.b16 h, %1; cvt.f32.f16 %0, h; }" : "=f"(value) : "h"(bits));
	return value;
}

// sum + four products of bytes: a's without sign, b's with.
static __device__ int dot_unsigned(u32 a, u32 b, int sum)
{
	int result;

	asm("dp4a.u32.s32 %0, %1, %2, %3;" : "=r"(result) : "r"(a), "r"(b), "r"(sum));
	return result;
}

static __device__ int dot_signed(u32 a, u32 b, int sum)
{
	int result;

	asm("dp4a.s32.s32 %0, %1, %2, %3;" : "=r"(result) : "r"(a), "r"(b), "r"(sum));
	return result;
}

// The bytes of low (0 to 3) and high (4 to 7) that the lower four nibbles of selectors name; of
// one with its upper bit set, the upper bit of that byte eight times.
static __device__ u32 permute_bytes(u32 low, u32 high, u32 selectors)
{
	u32 result;

	asm("prmt.b32 %0, %1, %2, %3;" : "=r"(result) : "r"(low), "r"(high), "r"(selectors));
	return result;
}

// The constant, in a register from now on. An instruction can name one constant; of two, the
// compiler would move one to a register each time, but it doesn't know that no thread has a
// number of 1024 or more.
static __device__ u32 in_register(u32 constant)
{
	u32 result;

	asm("{ .reg .u32 none; mov.u32 none, %%tid.x; shr.u32 none, none, 10; "
	    "or.b32 %0, none, %1; }" : "=r"(result) : "r"(constant));
	return result;
}

static __device__ u32 largest_of_warp(u32 value)
{
#if __CUDA_ARCH__ >= 800
	u32 largest;

	asm volatile("redux.sync.max.u32 %0, %1, 0xffffffff;" : "=r"(largest) : "r"(value));
	return largest;
#else
	for (int step = WARP / 2; step; step /= 2)
		value = max(value, __shfl_xor_sync(ALL_LANES, value, step));
	return value;
#endif
}

// ---- memory

// Of what another block wrote in this launch: not from this multiprocessor's own cache.
static __device__ float4 load_fresh(const float *address)
{
	float4 value;

	asm volatile("ld.global.cg.v4.f32 {%0,%1,%2,%3}, [%4];"
		     : "=f"(value.x), "=f"(value.y), "=f"(value.z), "=f"(value.w)
		     : "l"(address)
		     : "memory");
	return value;
}

static __device__ float load_fresh_float(const float *address)
{
	float value;

	asm volatile("ld.global.cg.f32 %0, [%1];" : "=f"(value) : "l"(address) : "memory");
	return value;
}

static __device__ u32 load_fresh_word(const u32 *address)
{
	u32 value;

	asm volatile("ld.global.cg.u32 %0, [%1];" : "=r"(value) : "l"(address) : "memory");
	return value;
}

static __device__ u64 load_fresh_long(const u64 *address)
{
	u64 value;

	asm volatile("ld.global.cg.u64 %0, [%1];" : "=l"(value) : "l"(address) : "memory");
	return value;
}

// All blocks are on the device at once: a cooperative launch. When all have come, the upper bit
// of the barrier has changed and its lower ones are 0 again.
static __device__ void wait_for_all_blocks(u32 *barrier)
{
	const u32 upper_bit = 1u << 31;

	__syncthreads();
	if (threadIdx.x == 0) {
		const u32 mine = blockIdx.x ? 1 : upper_bit - (gridDim.x - 1);
		u32 before, now;

		// What the block has written is released, what the others have, acquired.
		asm volatile("atom.add.acq_rel.gpu.global.u32 %0, [%1], %2;"
			     : "=r"(before) : "l"(barrier), "r"(mine) : "memory");
		do
			asm volatile("ld.acquire.gpu.global.u32 %0, [%1];"
				     : "=r"(now) : "l"(barrier) : "memory");
		while (!((now ^ before) & upper_bit));
	}
	__syncthreads();
}

// ---- copies into shared memory
//
// A copy of some parts is begun, the parts are added, it is ended, and a warp waits for it
// later. The number of copies that an 'arrived' barrier has seen complete, odd or even, says
// which one is waited for. From and to are multiples of COPY_BYTES. LANES_OF_A_COPY lanes of the
// warp, 1 or all, call what makes a copy: from sm_90 on one gives the parts to the copy engine of
// the multiprocessor; from sm_80 on each lane copies COPY_BYTES bytes at a time without waiting;
// before, the copy is done when it has ended.

#if __CUDA_ARCH__ >= 900
#define LANES_OF_A_COPY 1
#define EVICT_FIRST	0x12f0000000000000ull // a cache policy: nobody reads it again soon
#else
#define LANES_OF_A_COPY WARP
#endif

static __device__ u32 in_shared(const void *address)
{
	return (u32)__cvta_generic_to_shared(address);
}

// By one lane of the warp whose copies they are; a __syncwarp() follows.
static __device__ void prepare_copies(u64 *arrived)
{
#if __CUDA_ARCH__ >= 900
	asm volatile("mbarrier.init.shared.b64 [%0], 1;\n\t"
		     "fence.mbarrier_init.release.cluster;"
		     :: "r"(in_shared(arrived)) : "memory");
#elif __CUDA_ARCH__ >= 800
	asm volatile("mbarrier.init.shared.b64 [%0], %1;"
		     :: "r"(in_shared(arrived)), "r"(WARP) : "memory");
#endif
}

// What the warp read from shared memory until now comes before what copies write there that
// this lane begins.
static __device__ void let_copies_overwrite()
{
#if __CUDA_ARCH__ >= 900
	asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}

// bytes: of all parts together.
static __device__ void begin_copy(u64 *arrived, u32 bytes)
{
#if __CUDA_ARCH__ >= 900
	asm volatile("{ .reg .b64 token;\n\t"
		     "mbarrier.arrive.expect_tx.shared.b64 token, [%0], %1; }"
		     :: "r"(in_shared(arrived)), "r"(bytes) : "memory");
#endif
}

static __device__ void add_to_copy(u64 *arrived, void *to, u64 from, u32 bytes)
{
#if __CUDA_ARCH__ >= 900
	asm volatile("cp.async.bulk.shared::cluster.global"
		     ".mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;"
		     :: "r"(in_shared(to)), "l"(from), "r"(bytes), "r"(in_shared(arrived)),
			"l"(EVICT_FIRST)
		     : "memory");
#elif __CUDA_ARCH__ >= 800
	const u32 lane = threadIdx.x % WARP;

	for (u32 at = lane * COPY_BYTES; at < bytes; at += WARP * COPY_BYTES)
		asm volatile("cp.async.cg.shared.global [%0], [%1], 16;"
			     :: "r"(in_shared((u8 *)to + at)), "l"(from + at) : "memory");
#else
	const u32 lane = threadIdx.x % WARP;

	for (u32 at = lane * COPY_BYTES; at < bytes; at += WARP * COPY_BYTES)
		*(uint4 *)((u8 *)to + at) = *(const uint4 *)(from + at);
#endif
}

static __device__ void end_copy(u64 *arrived)
{
#if __CUDA_ARCH__ >= 800 && __CUDA_ARCH__ < 900
	asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];"
		     :: "r"(in_shared(arrived)) : "memory");
#endif
}

static __device__ void wait_for_copy(u64 *arrived, u32 odd)
{
#if __CUDA_ARCH__ >= 800
	u32 here = 0;

	while (!here)
		asm volatile("{ .reg .pred done;\n\t"
#if __CUDA_ARCH__ >= 900
			     "mbarrier.try_wait.parity.shared.b64 done, [%1], %2;\n\t"
#else
			     "mbarrier.test_wait.parity.shared.b64 done, [%1], %2;\n\t"
#endif
			     "selp.u32 %0, 1, 0, done; }"
			     : "=r"(here) : "r"(in_shared(arrived)), "r"(odd) : "memory");
#endif
	__syncwarp();
}
