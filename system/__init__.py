"""The machine that a run is on: files, processes, devices, errors, requests to stop. It knows nothing of training."""
