"""What gateways and workers must agree on: records, keys, transitions, errors, names."""
