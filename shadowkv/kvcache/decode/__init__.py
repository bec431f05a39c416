"""Steps: one more token for each sequence of a batch, planned on the host and attended to on the device."""
