"""What is wrong with this set-up?"""
