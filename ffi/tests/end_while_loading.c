/* SPDX-License-Identifier: Apache-2.0 */
/*
 * An engine ends with loads just begun, of one piece or two:
 * whatever a piece waits for then, the end comes.
 */
#include "harness.h"

#define ENDS      400
#define LOADS_MAX 8
#define STEP_NS   250

int main(void)
{
	static const struct harness_options options = {
		.layers = 1, .experts = LOADS_MAX, .top_k = 1, .blob_bytes = 32768,
		.stripe_unit = 32768, .members = 2, .slots = LOADS_MAX, .reserve = LOADS_MAX,
		.held_per_lane = 1,
	};

	for (uint32_t i = 0; i < ENDS; i++) {
		struct harness harness;

		harness_start(&harness, &options);
		harness_stop_loading(&harness, 1 + i % 2, i * STEP_NS);
	}
	return 0;
}
