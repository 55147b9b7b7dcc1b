//! The status codes of gRPC.

use std::fmt;

/// Why a call or an item failed, as gRPC counts reasons.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[non_exhaustive]
pub enum Code {
    /// Given up by the caller.
    Cancelled,
    /// Anything that no other code says.
    Unknown,
    /// The request cannot be meant, whatever the server's state.
    InvalidArgument,
    /// Too late.
    DeadlineExceeded,
    /// What is asked for does not exist.
    NotFound,
    /// What is to be made exists.
    AlreadyExists,
    /// The caller may not do this.
    PermissionDenied,
    /// Over a limit.
    ResourceExhausted,
    /// The server is in another state than the request needs.
    FailedPrecondition,
    /// Something else came in between.
    Aborted,
    /// Past the end.
    OutOfRange,
    /// The server does not know the method.
    Unimplemented,
    /// The server is broken.
    Internal,
    /// The server cannot answer now.
    Unavailable,
    /// Data is lost or damaged.
    DataLoss,
    /// The server does not know who calls.
    Unauthenticated,
}

const ALL: [(Code, &str); 16] = [
    (Code::Cancelled, "CANCELLED"),
    (Code::Unknown, "UNKNOWN"),
    (Code::InvalidArgument, "INVALID_ARGUMENT"),
    (Code::DeadlineExceeded, "DEADLINE_EXCEEDED"),
    (Code::NotFound, "NOT_FOUND"),
    (Code::AlreadyExists, "ALREADY_EXISTS"),
    (Code::PermissionDenied, "PERMISSION_DENIED"),
    (Code::ResourceExhausted, "RESOURCE_EXHAUSTED"),
    (Code::FailedPrecondition, "FAILED_PRECONDITION"),
    (Code::Aborted, "ABORTED"),
    (Code::OutOfRange, "OUT_OF_RANGE"),
    (Code::Unimplemented, "UNIMPLEMENTED"),
    (Code::Internal, "INTERNAL"),
    (Code::Unavailable, "UNAVAILABLE"),
    (Code::DataLoss, "DATA_LOSS"),
    (Code::Unauthenticated, "UNAUTHENTICATED"),
];

impl Code {
    /// The code of a number on the wire: `None` for 0, which is success; `Unknown` for a number without a meaning.
    pub fn from_number(number: i32) -> Option<Self> {
        let place = usize::try_from(number).ok().map(|number| number.wrapping_sub(1));
        match place {
            Some(usize::MAX) => None,
            Some(place) => Some(ALL.get(place).map_or(Self::Unknown, |(code, _)| *code)),
            None => Some(Self::Unknown),
        }
    }

    /// The number on the wire.
    pub fn number(self) -> i32 {
        // The table is in the order of the numbers, from 1.
        (1..)
            .zip(ALL)
            .find(|(_, (code, _))| *code == self)
            .map_or(2, |(number, _)| number)
    }

    /// As gRPC spells it: `NOT_FOUND`.
    pub fn as_str(self) -> &'static str {
        ALL.iter()
            .find(|(code, _)| *code == self)
            .map_or("UNKNOWN", |(_, name)| name)
    }
}

impl fmt::Display for Code {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_and_names_are_grpcs() {
        // Scenario: every number from -1 to 20, beside tonic's table.
        // Expected: the same numbers; success is none; what has no meaning is UNKNOWN.
        for number in 1..=16 {
            let code = Code::from_number(number).unwrap();
            assert_eq!(code.number(), number);
            let theirs = format!("{:?}", tonic::Code::from_i32(number)).to_uppercase();
            assert_eq!(code.as_str().replace('_', ""), theirs);
        }
        assert_eq!(Code::from_number(0), None);
        assert_eq!([-1, 17, 20].map(Code::from_number), [Some(Code::Unknown); 3]);
    }
}
