"""The HBM bill: counted by ledger.py, predicted by predict.py."""
