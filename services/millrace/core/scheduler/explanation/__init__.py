"""Why a request waits, and which mechanisms are in force."""
