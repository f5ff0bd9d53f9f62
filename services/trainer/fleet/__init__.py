"""The engines that sample for the job of this trainer, and how weights come to them."""
