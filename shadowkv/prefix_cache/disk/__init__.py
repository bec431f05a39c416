"""The disk tier: a directory of snapshots, which several servers may share"""
