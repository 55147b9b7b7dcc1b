//! The demo data set of a bare checkout.
