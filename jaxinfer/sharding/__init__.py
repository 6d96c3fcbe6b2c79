"""Where arrays lie: on one device, or in parts on the devices of a mesh."""
