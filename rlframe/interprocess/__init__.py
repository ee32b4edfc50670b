"""What processes of one machine share: memory, what they sleep on, and whether the others are still there."""
