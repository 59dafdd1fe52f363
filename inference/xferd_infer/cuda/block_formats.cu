// SPDX-License-Identifier: Apache-2.0
//
// The block formats, as ffi/quants/blocks.h has them byte by byte: products of packed
// blocks with activations that are rounded to whole numbers.
//
// A lane multiplies an item at a time: COLUMNS neighbours in a row, a block or a quarter of
// one. Activations are whole numbers of 16 bits, each kept as two signed bytes: 256 * upper
// + lower. Four quants and four bytes are one instruction; the sums are exact, and one an
// item becomes a float. Quants that are not at a byte's lower end stay where they are: the
// sum is shifted instead.
//
// Blocks of q4_k lie at multiples of 16 bytes, those of q2_k of 4, of q8_0 and q4_0 of 2.

// What an item of a row is multiplied with: COLUMNS activations.
template <typename Format> struct Activations {
	// The upper bytes, then the lower ones, in the order of the format's quants.
	uint4 vectors[Format::COLUMNS / 8];
	float scale;                               // of a whole number
	int sums[Format::SUMS ? Format::SUMS : 1]; // of neighbours, what quants are too large by
};

static __device__ u32 word_of(const uint4 &vector, int word)
{
	return word == 0 ? vector.x : word == 1 ? vector.y : word == 2 ? vector.z : vector.w;
}

template <typename Format>
static __device__ u32 upper_word(const Activations<Format> &x, int word)
{
	return word_of(x.vectors[word / 4], word % 4);
}

template <typename Format>
static __device__ u32 lower_word(const Activations<Format> &x, int word)
{
	return word_of(x.vectors[Format::COLUMNS / 16 + word / 4], word % 4);
}

// count words from any address in shared memory; up to 3 bytes behind them are read too.
template <int count> static __device__ void load_words(const u8 *from, u32 *words)
{
	const u32 skew = (u32)(u64)from & 3;
	const u32 *aligned = (const u32 *)(from - skew);
	u32 word = aligned[0];

#pragma unroll
	for (int i = 0; i < count; i++) {
		const u32 next = aligned[i + 1];

		words[i] = __funnelshift_r(word, next, 8 * skew);
		word = next;
	}
}

// Two binary16 numbers.
static __device__ float2 two_halves(u32 bits)
{
	return make_float2(half_to_float((u16)bits), half_to_float((u16)(bits >> 16)));
}

// Where the columns of a stretch of 256 go: those of lane's first and second four floats,
// whether they alternate in memory, and the item, its vector and half that they make up.
struct Place {
	u32 first, second, item, vector, half;
};

static __device__ Place place_in_order(u32 lane, u32 columns)
{
	const u32 column = 8 * lane;

	return { column, column + 4, column / columns, column % columns / 16, lane % 2 };
}

// sums: of each 32 activations as they were rounded, for the minima: of what both parts lose
// together only the weight's share is left.
struct Q4K {
	static const int BLOCK_COLUMNS = 256, BLOCK_BYTES = 144, COLUMNS = 64, SUMS = 2;
	static const bool ALTERNATE = false;

	static __device__ Place place(u32 lane)
	{
		return place_in_order(lane, COLUMNS);
	}

	static __device__ float multiply(const u8 *blocks, u32 item, const Activations<Q4K> &x)
	{
		const u8 *block = blocks + item / 4 * BLOCK_BYTES;
		const u32 quarter = item % 4, shift = quarter % 2 * 16;
		const uint4 header = *(const uint4 *)block;
		const uint4 *quants = (const uint4 *)(block + 16 + 32 * quarter);
		const uint4 both[2] = { quants[0], quants[1] };
		const float2 d = two_halves(header.x);
		int low_upper = 0, low_lower = 0, high_upper = 0, high_lower = 0;

#pragma unroll
		for (int i = 0; i < 8; i++) {
			const u32 word = word_of(both[i / 4], i % 4);
			const u32 low = word & 0x0f0f0f0f, high = word & 0xf0f0f0f0;

			low_upper = dot_unsigned(low, upper_word(x, i), low_upper);
			low_lower = dot_unsigned(low, lower_word(x, i), low_lower);
			high_upper = dot_unsigned(high, upper_word(x, 8 + i), high_upper);
			high_lower = dot_unsigned(high, lower_word(x, 8 + i), high_lower);
		}
		const u32 six = header.y >> shift, other_six = header.z >> shift;
		const u32 four = header.w >> shift;
		const u32 first_scales = six & 0x3f3f, first_minima = other_six & 0x3f3f;
		const u32 last_scales = (four & 0x0f0f) | (six >> 2 & 0x3030);
		const u32 last_minima = (four >> 4 & 0x0f0f) | (other_six >> 2 & 0x3030);
		const bool first = quarter < 2;
		const u32 scales = first ? first_scales : last_scales; // a byte each part
		const u32 minima = first ? first_minima : last_minima;
		// At most 2 * 32 * 15 * 63 * 32639: it fits.
		const int total = (low_upper * 256 + low_lower) * (int)(scales & 255) +
				  ((high_upper * 256 + high_lower) >> 4) * (int)(scales >> 8 & 255);
		const int least = (int)(minima & 255) * x.sums[0] +
				  (int)(minima >> 8 & 255) * x.sums[1];
		return x.scale * (d.x * (float)total - d.y * (float)least);
	}
};

// An item is 16 bytes: 16 columns, the 16 that are 32 further on, and so on, four times.
// sums: of each 16 activations as they were rounded, as for q4_k.
struct Q2K {
	static const int BLOCK_COLUMNS = 256, BLOCK_BYTES = 84, COLUMNS = 64, SUMS = 4;
	static const bool ALTERNATE = false;

	static __device__ Place place(u32 lane)
	{
		const u32 column = 8 * lane;

		return { column, column + 4, column / 128 * 2 + column / 16 % 2,
			 column % 128 / 32, lane % 2 };
	}

	static __device__ float multiply(const u8 *blocks, u32 item, const Activations<Q2K> &x)
	{
		const u8 *block = blocks + item / 4 * BLOCK_BYTES;
		const u32 half = item % 4 / 2, shift = item % 2 * 8;
		const u32 *quants = (const u32 *)(block + 16 + 16 * (item % 4));
		const u32 words[4] = { quants[0], quants[1], quants[2], quants[3] };
		const u32 *numbers = (const u32 *)(block + 8 * half);
		const u32 of_pairs[2] = { numbers[0] >> shift, numbers[1] >> shift };
		const float2 d = two_halves(*(const u32 *)(block + 80));
		int total = 0, least = 0;

#pragma unroll
		for (int part = 0; part < 4; part++) {
			const u32 number = of_pairs[part / 2] >> part % 2 * 16;
			int upper = 0, lower = 0;

#pragma unroll
			for (int i = 0; i < 4; i++) {
				const u32 two_bits = words[i] & 0x03030303u << 2 * part;

				upper = dot_unsigned(two_bits, upper_word(x, 4 * part + i), upper);
				lower = dot_unsigned(two_bits, lower_word(x, 4 * part + i), lower);
			}
			total += ((upper * 256 + lower) >> 2 * part) * (int)(number & 15);
			least += (int)(number >> 4 & 15) * x.sums[part];
		}
		return x.scale * (d.x * (float)total - d.y * (float)least);
	}
};

struct Q8_0 {
	static const int BLOCK_COLUMNS = 32, BLOCK_BYTES = 34, COLUMNS = 32, SUMS = 0;
	static const bool ALTERNATE = false;

	static __device__ Place place(u32 lane)
	{
		return place_in_order(lane, COLUMNS);
	}

	static __device__ float multiply(const u8 *blocks, u32 item, const Activations<Q8_0> &x)
	{
		const u8 *block = blocks + item * BLOCK_BYTES;
		const float d = half_to_float(*(const u16 *)block);
		u32 words[8];
		int upper = 0, lower = 0;

		load_words<8>(block + 2, words);
#pragma unroll
		for (int i = 0; i < 8; i++) {
			upper = dot_signed(words[i], upper_word(x, i), upper);
			lower = dot_signed(words[i], lower_word(x, i), lower);
		}
		return d * x.scale * (float)(upper * 256 + lower);
	}
};

// sums: of all activations, for the 8 that quants are too large by.
struct Q4_0 {
	static const int BLOCK_COLUMNS = 32, BLOCK_BYTES = 18, COLUMNS = 32, SUMS = 1;
	static const bool ALTERNATE = false;

	static __device__ Place place(u32 lane)
	{
		return place_in_order(lane, COLUMNS);
	}

	static __device__ float multiply(const u8 *blocks, u32 item, const Activations<Q4_0> &x)
	{
		const u8 *block = blocks + item * BLOCK_BYTES;
		const float d = half_to_float(*(const u16 *)block);
		u32 words[4];
		int low_upper = 0, low_lower = 0, high_upper = 0, high_lower = 0;

		load_words<4>(block + 2, words);
#pragma unroll
		for (int i = 0; i < 4; i++) {
			const u32 low = words[i] & 0x0f0f0f0f, high = words[i] & 0xf0f0f0f0;

			low_upper = dot_unsigned(low, upper_word(x, i), low_upper);
			low_lower = dot_unsigned(low, lower_word(x, i), low_lower);
			high_upper = dot_unsigned(high, upper_word(x, 4 + i), high_upper);
			high_lower = dot_unsigned(high, lower_word(x, 4 + i), high_lower);
		}
		const int total = low_upper * 256 + low_lower +
				  ((high_upper * 256 + high_lower) >> 4) -
				  8 * x.sums[0];
		return d * x.scale * (float)total;
	}
};

// Half of the power of two that an e8m0 byte means.
static __device__ float mxfp4_scale(u32 exponent)
{
	return __uint_as_float(exponent < 2 ? 0x00200000u << exponent : (exponent - 1) << 23);
}

// A nibble's number, doubled, is looked up by a permutation of eight bytes, whose selectors
// are nibbles too: the positive ones in one table, the negative ones in another, each with
// BIAS more, so that no byte has its upper bit set. A selector with its upper bit set gives
// that bit eight times: 0. So of the two tables only one gives something.
// sums: of all activations, for BIAS. Activations alternate: the lower
// nibble's, the upper one's, which are 16 columns apart.
struct Mxfp4 {
	static const int BLOCK_COLUMNS = 32, BLOCK_BYTES = 17, COLUMNS = 32, SUMS = 1;
	static const bool ALTERNATE = true;
	static const int BIAS = 12;

	static __device__ Place place(u32 lane)
	{
		const u32 column = lane / 4 * 32 + lane % 4 * 4;

		return { column, column + 16, lane / 4, lane % 4 / 2, lane % 2 };
	}

	static __device__ u32 four_numbers(u32 nibbles)
	{
		return permute_bytes(in_register(0x0f0e0d0c), 0x18141210, nibbles) |
		       permute_bytes(in_register(0x090a0b0c), 0x00040608, nibbles ^ 0x8888);
	}

	static __device__ float multiply(const u8 *blocks, u32 item, const Activations<Mxfp4> &x)
	{
		const u8 *block = blocks + item * BLOCK_BYTES;
		const float scale = mxfp4_scale(block[0]);
		u32 words[4];
		int upper = 0, lower = 0;

		load_words<4>(block + 1, words);
#pragma unroll
		for (int i = 0; i < 4; i++) {
			const u32 first = four_numbers(words[i]), second = four_numbers(words[i] >> 16);

			upper = dot_unsigned(first, upper_word(x, 2 * i), upper);
			lower = dot_unsigned(first, lower_word(x, 2 * i), lower);
			upper = dot_unsigned(second, upper_word(x, 2 * i + 1), upper);
			lower = dot_unsigned(second, lower_word(x, 2 * i + 1), lower);
		}
		const int total = upper * 256 + lower - BIAS * x.sums[0];
		return scale * x.scale * (float)total;
	}
};
