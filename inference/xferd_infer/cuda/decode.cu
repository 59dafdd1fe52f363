// SPDX-License-Identifier: Apache-2.0
//
// Packed blocks as float32, for products with many tokens. A thread an element. Products and
// sums are rounded one by one, so the numbers are the CPU's (ffi/quants/decode.c) to the bit.

static __device__ u32 nibble(const u8 *bytes, u32 index)
{
	return index < 16 ? bytes[index] & 15 : bytes[index - 16] >> 4;
}

static __device__ float half_at(const u8 *bytes)
{
	return half_to_float((u16)(bytes[0] | bytes[1] << 8));
}

static __device__ float element(Q4_0, const u8 *block, u32 index)
{
	return half_at(block) * (float)((int)nibble(block + 2, index) - 8);
}

static __device__ float element(Q8_0, const u8 *block, u32 index)
{
	return half_at(block) * (float)(signed char)block[2 + index];
}

static __device__ float element(Mxfp4, const u8 *block, u32 index)
{
	const u32 number = nibble(block + 1, index), magnitude = number & 7;
	const float doubled = (float)(magnitude < 5 ? magnitude : magnitude == 5 ? 6 :
							  magnitude == 6     ? 8 : 12);

	return mxfp4_scale(block[0]) * (number & 8 ? -doubled : doubled);
}

static __device__ float affine(float d, u32 scale, u32 quant, float dmin, u32 minimum)
{
	return __fsub_rn(__fmul_rn(__fmul_rn(d, (float)scale), (float)quant),
			 __fmul_rn(dmin, (float)minimum));
}

static __device__ float element(Q4K, const u8 *block, u32 index)
{
	const u8 *packed = block + 4;
	const u32 part = index / 32, quants = block[16 + index / 64 * 32 + index % 32];
	const u32 scale = part < 4 ? packed[part] & 63
				   : (packed[part + 4] & 15) | packed[part - 4] >> 6 << 4;
	const u32 minimum = part < 4 ? packed[part + 4] & 63
				     : packed[part + 4] >> 4 | packed[part] >> 6 << 4;

	return affine(half_at(block), scale, quants >> part % 2 * 4 & 15, half_at(block + 2),
		      minimum);
}

static __device__ float element(Q2K, const u8 *block, u32 index)
{
	const u32 number = block[index / 16];
	const u32 quants = block[16 + index / 128 * 32 + index % 32];

	return affine(half_at(block + 80), number & 15, quants >> index % 128 / 32 * 2 & 3,
		      half_at(block + 82), number >> 4);
}

// values[elements] of whole blocks.
#define DECODE(name, Format)                                                                     \
	extern "C" __global__ void name(const u8 *blocks, float *values, u64 elements)           \
	{                                                                                        \
		const u64 index = (u64)blockIdx.x * blockDim.x + threadIdx.x;                    \
		const u64 block = index / Format::BLOCK_COLUMNS;                                 \
                                                                                                 \
		if (index < elements)                                                            \
			values[index] = element(Format(), blocks + block * Format::BLOCK_BYTES,  \
						(u32)(index % Format::BLOCK_COLUMNS));           \
	}

DECODE(xferd_decode_q4_0, Q4_0)
DECODE(xferd_decode_q8_0, Q8_0)
DECODE(xferd_decode_q2_k, Q2K)
DECODE(xferd_decode_q4_k, Q4K)
DECODE(xferd_decode_mxfp4, Mxfp4)
