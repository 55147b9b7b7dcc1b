//! The admin service.
