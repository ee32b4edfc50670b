"""The trajectory service: between environments that send groups of sequences and trainers that pull batches of them."""
