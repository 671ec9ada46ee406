"""How the packaged calibration texts were made."""
