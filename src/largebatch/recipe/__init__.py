"""What must change when the batch does?"""
