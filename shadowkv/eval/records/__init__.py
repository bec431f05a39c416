"""What an evaluation is about: samples and the predictions to them, and the policies that are compared."""
