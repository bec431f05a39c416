"""What a policy is: its fields, the sizes of the model it is for, and when tokens get a fitted state of their own."""
