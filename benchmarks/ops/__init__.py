"""Times of single kernels, compared with the times that the hardware would allow."""
