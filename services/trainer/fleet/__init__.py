"""The engines that sample for this trainer's job, and how weights reach them."""
