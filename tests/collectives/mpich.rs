//! mpich
