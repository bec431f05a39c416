"""What is computed next: which requests are admitted, prefills, and decode steps beside them"""
