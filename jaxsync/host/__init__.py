"""What runs on the host while programs run on devices."""
