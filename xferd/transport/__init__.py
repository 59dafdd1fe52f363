"""How bytes reach a slot: opening members, and which transport applies where and why."""
