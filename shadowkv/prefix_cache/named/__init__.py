"""What is asked for by name: saved prompts, snapshots that another server hands over, and archives of both"""
