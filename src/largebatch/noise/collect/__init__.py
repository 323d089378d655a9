"""How long is each gradient of a step, wherever it arrives and however the model is spread over workers?"""
