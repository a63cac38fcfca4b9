"""Registration of the device with torch, and the monkeypatches that it needs."""
