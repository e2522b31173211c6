"""The model as plain functions of weights, ops and buffers. Stages call `ops`, never a kernel by name."""
