"""The prefix cache below the device: snapshots of sequences as files that outlive the process."""
