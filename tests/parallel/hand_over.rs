//! give and take: values between the devices of a gang.
