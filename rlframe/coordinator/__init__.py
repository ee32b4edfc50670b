"""The coordinator: elastic training that does not stop. See docs/coordinator.md."""
